"""Error responses in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from engine.server.front_end.errors import ApiError

ErrorBody = Callable[[ApiError], object]
"""Makes the JSON body of an error response."""
ERROR_BODY = "error_body"
"""Name of a request's ErrorBody in the scope's state; OpenAI's shape without."""
READ = ["GET", "HEAD"]
"""Methods of routes that only report."""


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of any msgspec-encodable object."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError, scope: Scope) -> Response:
    """The HTTP response that reports `error` of a request, in the shape of its path's protocol."""
    body: ErrorBody | None = scope["state"].get(ERROR_BODY)
    return json_response((body or ApiError.body)(error), status=error.status, headers=error.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An ApiError with status 400, for the parameter `param`."""
    return ApiError(400, message, param=param, code=code)
