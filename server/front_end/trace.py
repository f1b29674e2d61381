"""The spans that a front end records of itself while an engine records a trace."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from engine.core.timeline import Spans, write_part
from engine.server.shared.messages import RecordSpans

EVENT_LOOP = "event loop"
"""Row of what runs on it; what runs in another thread has a row of the thread's name."""

P = ParamSpec("P")
T = TypeVar("T")

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
        """Add a span to all traces; from any thread. begin, end: time.monotonic_ns(). Spans of one row must nest."""
        for spans in tuple(self._spans.values()):
            spans.add(row, name, begin, end, args)

    def spanned(self, name: str, work: Callable[P, T]) -> Callable[P, T]:
        """A function that does `work` and adds its time as a span."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            begin = time.monotonic_ns()
            try:
                return work(*args, **kwargs)
            finally:
                thread = threading.current_thread()
                row = EVENT_LOOP if thread is threading.main_thread() else thread.name.replace("_", " ")
                self.add(row, name, begin, time.monotonic_ns())

        return call


def _write(message: RecordSpans, spans: Spans) -> None:
    """Write the part; without it the trace says that it is missing."""
    try:
        write_part(message.directory, message.name, spans.part(message.name.replace("-", " "), 0))
    except OSError as error:
        log.warning("the spans for a trace could not be written to %s: %s", message.directory, error.strerror)
