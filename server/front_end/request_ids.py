"""The IDs of the request that is being answered, for log entries about it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

from attrs import define

from engine.server.front_end.access_log import new_request_id


@define
class RequestIds:
    """The IDs of one request."""

    request_id: bytes = b""
    """Empty until it is known."""
    trace_id: str = ""
    """Of the client's trace, or of the one that tracing began; empty without either."""

    def fields(self) -> Mapping[str, str]:
        """The IDs as fields of a log entry. A request that has no ID yet gets one, which its response then has."""
        if not self.request_id:
            self.request_id = new_request_id()
        found = {"request_id": self.request_id.decode()}
        return found | {"trace_id": self.trace_id} if self.trace_id else found


current: ContextVar[RequestIds | None] = ContextVar("current", default=None)
"""The request of a task and of the tasks it has started; set only with server.log_format = "json"."""


def current_fields() -> Mapping[str, str]:
    """Fields of a log entry that is written now."""
    ids = current.get()
    return {} if ids is None else ids.fields()
