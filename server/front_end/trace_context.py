"""The W3C trace context of a request: which trace the client's span belongs to, and whether that trace is recorded.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import frozen

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
SAMPLED = 0x01
"""The flag that says that the caller records the trace."""
MAX_STATE = 512
"""A longer tracestate is left out, characters."""

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[ -~]*")


@frozen
class TraceContext:
    """The span of a caller."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    sampled: bool
    """Whether the caller records the trace."""
    state: str = ""
    """What tracing systems on the way have noted; handed on unchanged."""

    @property
    def header(self) -> bytes:
        """The value of the header traceparent."""
        return f"00-{self.trace_id}-{self.span_id}-{SAMPLED if self.sampled else 0:02x}".encode()


def context_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """The caller's context, from (name, value) pairs with names in lower case; None if there is no valid one."""
    parents, states = [], []
    for name, value in headers:
        if name == TRACEPARENT:
            parents.append(value)
        elif name == TRACESTATE:
            states.append(value)
    if len(parents) != 1:
        return None
    match = _PARENT.fullmatch(parents[0].strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = b",".join(states).decode("latin-1")
    if len(state) > MAX_STATE or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & SAMPLED), state)
