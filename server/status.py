"""GET /v1/models, /health and /metrics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from engine.server.errors import json_response
from engine.server.metrics import Exporter
from engine.server.service import Service


def routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter()
    client = service.client
    exporter = Exporter(client.board, lambda: client.stats, lambda: client.failure is None, service.startup)

    @router.get("/v1/models", response_model=None)
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(service)]})

    @router.get("/v1/models/{model:path}", response_model=None)
    async def model(model: str) -> Response:
        service.check_model(model)
        return json_response(_model(service))

    @router.get("/health", response_model=None)
    async def health() -> Response:
        if client.failure is not None:
            since = datetime.fromtimestamp(client.failure.since, UTC).isoformat(timespec="milliseconds")
            body = {"status": "failed", "reason": client.failure.reason, "since": since}
            return json_response(body, status=503)
        if service.draining:
            return json_response({"status": "draining", "reason": "the server is shutting down"}, status=503)
        return json_response({"status": "ok"})

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(exporter.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "engine",
        "max_model_len": service.max_len,
    }
