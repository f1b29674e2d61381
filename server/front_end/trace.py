"""The spans that a front end records of itself while an engine records a trace."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from engine.core.timeline import Spans, write_part
from engine.server.shared.messages import RecordSpans

log = logging.getLogger(__name__)


class FrontEndTrace:
    """The traces, one per replica at most, to which this front end contributes at the moment."""

    def __init__(self) -> None:
        self._spans: dict[int, Spans] = {}

    @property
    def active(self) -> bool:
        """Whether a trace is recorded."""
        return bool(self._spans)

    def update(self, message: RecordSpans) -> None:
        """Begin to record for a trace, or end and write this front end's part of it."""
        if message.begin:
            self._spans[message.replica] = Spans()
            return
        spans = self._spans.pop(message.replica, None)
        if spans is not None:
            threading.Thread(target=_write, args=(message, spans), name="trace").start()

    def drop(self, replica: int) -> None:
        """Record no more for a replica whose engine process has exited."""
        self._spans.pop(replica, None)

    def add(self, row: str, name: str, begin: int, end: int, args: Mapping[str, Any] | None = None) -> None:
        """Add a span to all traces. begin, end: time.monotonic_ns(). Spans of one row must nest."""
        for spans in self._spans.values():
            spans.add(row, name, begin, end, args)


def _write(message: RecordSpans, spans: Spans) -> None:
    """Write the part; without it the trace says that it is missing."""
    try:
        write_part(message.directory, message.name, spans.part(message.name.replace("-", " "), 0))
    except OSError as error:
        log.warning("the spans for a trace could not be written to %s: %s", message.directory, error.strerror)
