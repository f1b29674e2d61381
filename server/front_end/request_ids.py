"""The IDs of the request that is being answered, for its response and for log entries about it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextvars import ContextVar

from attrs import define

HEADERS = (b"x-request-id", b"request-id")
"""Headers of a response that have the request's ID: OpenAI's clients read the first, Anthropic's the second."""
REQUEST_IDS = "request_ids"
"""Name of a request's RequestIds in the scope's state."""


@define
class RequestIds:
    """The IDs of one request."""

    request_id: bytes = b""
    """Empty until it is known."""
    trace_id: str = ""
    """Of the client's trace, or of the one that tracing began; empty without either."""

    def fields(self) -> Mapping[str, str]:
        """The IDs as fields of a log entry."""
        found = {"request_id": self.known().decode()}
        return found | {"trace_id": self.trace_id} if self.trace_id else found

    def known(self) -> bytes:
        """The request's ID. A request that has none yet gets one, which its response then has."""
        if not self.request_id:
            self.request_id = b"req-%b" % uuid.uuid4().hex.encode()
        return self.request_id

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of a response that have the request's ID."""
        return [(name, self.known()) for name in HEADERS]


current: ContextVar[RequestIds | None] = ContextVar("current", default=None)
"""The request of a task and of the tasks it has started; set only with server.log_format = "json"."""


def current_fields() -> Mapping[str, str]:
    """Fields of a log entry that is written now."""
    ids = current.get()
    return {} if ids is None else ids.fields()
