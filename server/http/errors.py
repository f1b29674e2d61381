"""JSON responses, including those that report errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from engine.core.protocols import invalid
from engine.server.front_end.errors import ERROR_BODY, ApiError, ErrorBody, body_of
from engine.server.front_end.request_trace import TRACE, RequestTrace

__all__ = ["ERROR_BODY", "READ", "ErrorBody", "error_response", "invalid", "json_response", "record_error"]

READ = ["GET", "HEAD"]
"""Methods of routes that only report."""


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of any msgspec-encodable object."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError, scope: Scope) -> Response:
    """The HTTP response that reports `error` of a request, in the shape of its path's protocol."""
    record_error(error, scope)
    return json_response(body_of(error, scope["state"]), status=error.status, headers=error.headers)


def record_error(error: ApiError, scope: Scope) -> None:
    """Record the error of a request in its trace, if it has one."""
    trace: RequestTrace | None = scope["state"].get(TRACE)
    if trace is not None:
        trace.fail(error.status, error.code, error.message)
