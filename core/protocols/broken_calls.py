"""Calls of tools that break off, which must not look complete to a client."""

from __future__ import annotations

import msgspec

from engine.core.parsers import CallArguments, CallEnd, Event, Malformed
from engine.core.protocols.errors import ApiError, excerpt


def breaks_call(event: Event) -> bool:
    """Whether an event shows that the open call cannot be completed, for a reason other than the end of the output."""
    if isinstance(event, Malformed):
        return not event.at_end
    return not isinstance(event, CallArguments | CallEnd)


def call_text(name: str, arguments: str) -> str:
    """A broken call as text of an answer: its name, and what there is of its arguments."""
    return f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": {arguments}'


def broken_call(name: str, reason: str | None, *, stop_string: str | None = None) -> ApiError:
    """The error that ends a stream in which a part of a broken call was sent, so that no client runs that part.

    reason: what was wrong; None: the output ended within the call. stop_string: which ended the output.
    """
    again = "send the request again"
    if stop_string is not None:
        reason, again = f"the stop string {excerpt(stop_string)!r} is in it", f"{again} without this stop string"
    return ApiError(
        500,
        f"the call of {excerpt(name)!r}, a part of which was sent, cannot be completed: "
        f"{reason or 'the output ended within it'}; do not run it, but {again}",
    )
