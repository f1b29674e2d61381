"""The error that a front end reports to an HTTP client; it is a part of the contract of protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.core.protocols import MAX_MESSAGE, ApiError, excerpt
from engine.server.front_end.request_ids import REQUEST_IDS, RequestIds

__all__ = ["ERROR_BODY", "MAX_MESSAGE", "ApiError", "ErrorBody", "body_of", "excerpt", "identify"]

ErrorBody = Callable[[ApiError], object]
"""Makes the JSON body of an error response."""
ERROR_BODY = "error_body"
"""Name of a request's ErrorBody in the scope's state; OpenAI's shape without."""


def body_of(error: ApiError, state: dict[str, Any]) -> object:
    """The JSON body of the response that reports `error`, in the shape of the protocol of the request's path.

    state: that of the request's scope.
    """
    identify(error, state)
    body: ErrorBody = state.get(ERROR_BODY, ApiError.body)
    return body(error)


def identify(error: ApiError, state: dict[str, Any]) -> None:
    """Set the error's request ID, which the response then has. state: that of the request's scope."""
    ids: RequestIds | None = state.get(REQUEST_IDS)
    if ids is not None:
        error.request_id = ids.known().decode()
