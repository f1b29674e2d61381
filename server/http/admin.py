"""POST /reset_prefix_cache, and the routes that start and stop profiles; all need an admin key (access.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.server.front_end.errors import ApiError
from engine.server.http.errors import invalid, json_response
from engine.server.http.request_bodies import read_optional
from engine.server.http.service import Service

MAX_STEPS = 2**31
"""Exclusive upper bound of a number of steps. Messages to engine processes hold integers of at most 64 bits."""


class ReplicaBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a route of administration, which may be empty."""

    replica: int | None = None
    """The replica that is meant; None: all."""


class StartProfileBody(ReplicaBody, kw_only=True, forbid_unknown_fields=True):
    """POST /start_profile, by the names of TraceOptions."""

    steps: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEPS)] = 0
    """Steps to record; 0: until /stop_profile."""
    after: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STEPS)] = 0
    """Steps to wait before the first one recorded."""
    activities: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    nvtx: bool = False


class StopProfileBody(ReplicaBody, kw_only=True, forbid_unknown_fields=True):
    """POST /stop_profile."""

    wait: bool = False
    """Whether to wait for the steps that /start_profile asked for, instead of ending now."""


class StartLayerProfileBody(ReplicaBody, kw_only=True, forbid_unknown_fields=True):
    """POST /start_layer_profile."""

    steps: Annotated[int, msgspec.Meta(ge=1, lt=MAX_STEPS)] = 20
    """Steps to record."""


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

    @router.post("/start_profile", response_model=None)
    async def start_profile(request: Request) -> Response:
        body = await read_optional(request, StartProfileBody, service.limits)
        arguments = {name: getattr(body, name) for name in ("steps", "after", "activities", "nvtx")}
        return await _call(service, _replicas(service, body.replica), "start_profile", arguments)

    @router.post("/stop_profile", response_model=None)
    async def stop_profile(request: Request) -> Response:
        body = await read_optional(request, StopProfileBody, service.limits)
        return await _call(service, _replicas(service, body.replica), "stop_profile", {"wait": body.wait})

    @router.post("/start_layer_profile", response_model=None)
    async def start_layer_profile(request: Request) -> Response:
        body = await read_optional(request, StartLayerProfileBody, service.limits)
        replicas = _replicas(service, body.replica)
        return await _call(service, replicas, "start_layer_profile", {"steps": body.steps})

    @router.post("/stop_layer_profile", response_model=None)
    async def stop_layer_profile(request: Request) -> Response:
        body = await read_optional(request, ReplicaBody, service.limits)
        return await _call(service, _replicas(service, body.replica), "stop_layer_profile", {})

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
