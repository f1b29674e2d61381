"""The error that the server reports to an HTTP client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ECHO_CHARS = 200
"""Maximum characters of what a client sent that an error repeats."""
MAX_MESSAGE = 2 * ECHO_CHARS
"""Maximum characters of the message of a refusal."""


TYPES = {429: "rate_limit_error"}
"""Status below 500 -> OpenAI's type of the error, if it is none of the request."""


class ApiError(Exception):
    """A refusal or failure: an HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """param: the request parameter at fault. code: OpenAI's or this server's error code.

        Message and parameter of a refusal are shortened, so that no refusal sends a large request back.
        """
        if status < 500:
            message = excerpt(message, MAX_MESSAGE)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else excerpt(param)
        self.code = code
        self.headers = dict(headers or {})
        self.request_id = ""
        """ID of the request, for `error_body` and AnswerWriter.error_event: the server sets it before it calls them."""

    def body(self) -> dict[str, Any]:
        """The JSON object of the response; `type` follows from the status."""
        kind = "server_error" if self.status >= 500 else TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def excerpt(text: str, max_chars: int = ECHO_CHARS) -> str:
    """`text`, without its middle if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    end = max_chars // 3
    return f"{text[: max_chars - end - 3]}...{text[-end:]}"
