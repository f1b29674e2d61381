"""Spans that a process records of itself, and the file in which it leaves them for the merge."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from engine.core.phase_timer import PhaseTimer
from engine.core.timeline.clock import ClockPair, read_clocks

MAX_SPANS = 200_000
"""Spans that a process keeps; later ones are counted only."""
SUFFIX = ".part.json"


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A slice of time in one row of a process. Times are of CLOCK_MONOTONIC, ns."""

    row: str
    name: str
    begin: int
    end: int
    args: dict[str, Any] | None = None


class Stages(msgspec.Struct, frozen=True, array_like=True):
    """A slice that may overlap others of its kind, and its stages, which follow each other."""

    kind: str
    """"request" or "step"."""
    id: str
    name: str
    begin: int
    end: int
    stages: tuple[tuple[str, int, int], ...] = ()
    """(name, begin, end)."""
    args: dict[str, Any] | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one process recorded."""

    process: str
    """As shown: "engine", "rank 0", "front end 1.1"."""
    pid: int
    order: int
    """Position among the processes, from the top."""
    clocks: tuple[ClockPair, ...]
    """At the begin and at the end."""
    spans: tuple[Span, ...] = ()
    stages: tuple[Stages, ...] = ()
    kineto: str = ""
    """File of torch.profiler's trace, next to this one; empty: none."""
    cut: str = ""
    """What the process did not record, in a sentence; empty: nothing is missing."""


class Spans:
    """The spans of one process while it is recorded."""

    def __init__(self, limit: int = MAX_SPANS) -> None:
        self.clocks = [read_clocks()]
        self._limit = limit
        self._spans: list[Span] = []
        self._dropped = 0

    def add(self, row: str, name: str, begin: int, end: int, args: Mapping[str, Any] | None = None) -> None:
        """Add a span. begin, end: time.monotonic_ns(). Spans of one row must nest."""
        if len(self._spans) == self._limit:
            self._dropped += 1
            return
        self._spans.append(Span(row, name, begin, end, None if args is None else dict(args)))

    def part(self, process: str, order: int, *, stages: Sequence[Stages] = (), kineto: str = "", cut: str = "") -> Part:
        """Everything recorded, up to now."""
        dropped = f"{process} recorded {self._limit} spans and left out {self._dropped} later ones"
        return Part(
            process=process,
            pid=os.getpid(),
            order=order,
            clocks=(*self.clocks, read_clocks()),
            spans=tuple(self._spans),
            stages=tuple(stages),
            kineto=kineto,
            cut="; ".join(filter(None, (cut, dropped if self._dropped else ""))),
        )


class SpanTimer(PhaseTimer):
    """A PhaseTimer that also records each of its blocks as a span."""

    __slots__ = ("_after", "_name", "_nvtx", "_row", "_spans")

    def __init__(
        self,
        spans: Spans,
        row: str,
        name: str,
        seconds: float,
        *,
        after: Callable[[], None] | None = None,
        nvtx: bool = False,
    ) -> None:
        """seconds: counted by the timer that this one replaces. after: called at the end of each block. nvtx: whether
        each block is also an NVTX range."""
        super().__init__()
        self.seconds = seconds
        self._spans = spans
        self._row = row
        self._name = name
        self._after = after
        self._nvtx: Any = None
        if nvtx:
            import torch

            self._nvtx = torch.cuda.nvtx

    @property
    def begin(self) -> int:
        """Begin of the latest block, time.monotonic_ns()."""
        return round(self._begin * 1e9)

    def plain(self) -> PhaseTimer:
        """A timer that goes on to count, and records nothing."""
        timer = PhaseTimer()
        timer.seconds = self.seconds
        return timer

    def __enter__(self) -> None:
        if self._nvtx is not None:
            self._nvtx.range_push(self._name)
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._spans.add(self._row, self._name, self.begin, time.monotonic_ns())
        if self._nvtx is not None:
            self._nvtx.range_pop()
        if self._after is not None:
            self._after()


def write_part(directory: str | Path, name: str, part: Part) -> None:
    """Write a part for the merge, which sees it only once it is whole. Raises OSError."""
    file = Path(directory) / f"{name}{SUFFIX}"
    whole = file.with_suffix(".tmp")
    whole.write_bytes(msgspec.json.encode(part))
    whole.rename(file)
