"""Error responses in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from engine.server.front_end.errors import ApiError

READ = ["GET", "HEAD"]
"""Methods of routes that only report."""


def json_response(body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of any msgspec-encodable object."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The HTTP response that reports `error`."""
    return json_response(error.body(), status=error.status, headers=error.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """An ApiError with status 400, for the parameter `param`."""
    return ApiError(400, message, param=param, code=code)
