"""POST /reset_prefix_cache: routes of administration, which need an admin key (access.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.server.front_end.errors import ApiError
from engine.server.http.errors import invalid, json_response
from engine.server.http.request_bodies import read_optional
from engine.server.http.service import Service


class ReplicaBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a route of administration, which may be empty."""

    replica: int | None = None
    """The replica that is meant; None: all."""


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.post("/reset_prefix_cache", response_model=None)
    async def reset_prefix_cache(request: Request) -> Response:
        body = await read_optional(request, ReplicaBody, service.limits)
        replicas = _replicas(service, body.replica)
        response = await _call(service, replicas, "reset_prefix_cache", {})
        for replica in replicas:
            service.client.forget_prefixes(replica)
        return response

    return router


def _replicas(service: Service, replica: int | None) -> list[int]:
    """The replicas that a request means. Raises ApiError if there is no such replica."""
    numbers = list(range(len(service.client.links)))
    if replica is None:
        return numbers
    if replica not in numbers:
        raise invalid(f"there is no replica {replica}; the last one is {numbers[-1]}", "replica")
    return [replica]


async def _call(service: Service, replicas: list[int], name: str, arguments: Mapping[str, Any]) -> Response:
    """Run a control call on these replicas and report each one's answer or error.

    The status is that of the first error, if there is one. Raises ApiError for the error of a single replica.
    """
    calls = (service.client.control.call(replica, name, arguments) for replica in replicas)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    status, reports = 200, []
    for replica, answer in zip(replicas, answers, strict=True):
        if isinstance(answer, ApiError) and len(replicas) > 1:
            status = answer.status if status == 200 else status
            reports.append({"replica": replica, "error": {"message": answer.message, "code": answer.code}})
        elif isinstance(answer, BaseException):
            raise answer
        else:
            reports.append({"replica": replica, **answer})
    return json_response({"replicas": reports}, status=status)
