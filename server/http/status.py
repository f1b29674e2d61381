"""GET /v1/models, /health, /ping, /version and /metrics."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import engine
from engine.server.front_end.errors import excerpt
from engine.server.http.errors import READ, invalid, json_response
from engine.server.http.health_report import State, report
from engine.server.http.prometheus import PrometheusExporter
from engine.server.http.service import Service
from engine.server.metrics.exposition import CONTENT_TYPE


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()
    exporter = PrometheusExporter(
        service.client.metrics_table,
        service.engine_reports,
        model_name=service.name,
        max_len=service.max_len,
        names=service.limits.metrics_names,
        supervisor=service.supervisor,
        routes=lambda: service.http_routes,
    )

    @router.api_route("/v1/models", methods=READ, response_model=None)
    async def models() -> Response:
        ends = {"first_id": service.name, "last_id": service.name, "has_more": False}  # of Anthropic's pages
        return json_response({"object": "list", "data": [_model(service)], **ends})

    @router.api_route("/v1/models/{model:path}", methods=READ, response_model=None)
    async def model(model: str) -> Response:
        service.check_model(model)
        return json_response(_model(service))

    @router.api_route("/health", methods=READ, response_model=None)
    async def health(deep: str = "0") -> Response:
        if deep not in ("0", "1"):
            raise invalid(f"deep is {excerpt(deep)!r}; it must be 0 or 1", "deep")
        states: Sequence[State] = service.faults()
        if not all(states):
            if service.draining:
                return json_response({"status": "draining", "reason": "the server is shutting down"}, status=503)
            if deep == "1":
                states = await service.probe()
        status, body = report(states)
        return json_response(body, status=status)

    @router.api_route("/ping", methods=READ, response_model=None)
    async def ping() -> Response:
        return await health()

    @router.api_route("/version", methods=READ, response_model=None)
    async def version() -> Response:
        return json_response({"version": engine.__version__})

    @router.api_route("/metrics", methods=READ, response_model=None)
    async def metrics() -> Response:
        return Response(exporter.text(), media_type=CONTENT_TYPE)

    return router


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "type": "model",  # Anthropic's name of object
        "display_name": service.name,
        "created": service.created,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "owned_by": "engine",
        "max_model_len": service.max_len,
        "revision": service.revision,
    }
