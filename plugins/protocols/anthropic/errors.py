"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from engine.core.protocols import ApiError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> type of the error; others are `api_error` from 500 on and `invalid_request_error` below."""
TOO_LONG = "prompt is too long: "
"""Begins the message of a prompt that the context cannot hold: clients look for it to shorten the conversation."""

NO_THREADS = "thread_unsupported_request"
"""Code of the refusal of `thread`, after which clients send the whole conversation instead."""


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object of a response or of an `error` event."""
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = TOO_LONG + error.message if error.code == "context_length_exceeded" else error.message
    details = {"details": {"error_code": NO_THREADS, "unsupported": ["thread"]}} if error.code == NO_THREADS else {}
    known = {"request_id": error.request_id} if error.request_id else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, **known}
