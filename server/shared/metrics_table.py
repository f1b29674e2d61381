"""The metrics table: counters and histograms of all front ends, in a file that all of them map.

Each front end writes its own row and reads all rows, so any front end can answer /metrics for the whole server. A row
outlives the process that wrote it.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from engine.core.gc_pauses import GcPauses
from engine.core.types import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, RequestTimes

SHORT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
LONG_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of histogram buckets, seconds."""

FINISH_REASONS = (FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR)

DropReason = Literal["lost", "refused", "evicted", "invalid", "header_timeout", "body_timeout", "write_timeout"]
"""Why a front end drops a connection.

lost: no file descriptor was left to receive it; refused: server.max_connections were open; evicted: it was idle, and
another needed its place; invalid: the request is not HTTP or exceeds a limit of its head; the others: server's settings
of these names.
"""
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)

FrontEndPhase = Literal["http", "tokenize", "route", "deliver", "detokenize", "write"]
"""What a front end's event loop does.

http: all that is in no other phase: parsing and checking requests, responses that are not streamed, the event loop;
tokenize: chat templates and tokenizing, also in threads; route: choosing replicas and sending requests to them;
deliver: receiving the engine's messages; detokenize: from tokens to text and events; write: events to the sockets.
"""
FRONT_END_PHASES: tuple[FrontEndPhase, ...] = get_args(FrontEndPhase)

HEARTBEAT_INTERVAL = 0.5
"""Seconds between two heartbeats of a front end."""
OPEN_REQUESTS, CLOSED_CONNECTIONS, CONNECTIONS, HEARTBEATS, NUM_SINGLE = range(5)
"""Cells of a row that hold one number, and their number."""


class Histogram:
    """Counts durations in buckets; cheap enough to update once per token."""

    def __init__(self, bounds: tuple[float, ...], cells: memoryview[float]) -> None:
        """cells: one count per bound, one count beyond the last bound, and the sum."""
        self._bounds = bounds
        self._cells = cells

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count a duration `count` times."""
        self._cells[bisect_left(self._bounds, seconds)] += count
        self._cells[-1] += seconds * count

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of durations up to that bound) of each bucket, as Prometheus expects."""
        total = 0.0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._cells[:-1], strict=True):
            total += count
            buckets.append((bound, total))
        return buckets

    @property
    def sum(self) -> float:
        """Sum of all durations, seconds."""
        return self._cells[-1]


class FrontEndMetrics:
    """One row of the metrics table: what one front end counts and measures.

    The engine's own numbers come as EngineStats from the engine processes.
    """

    SIZE = NUM_SINGLE + len(FINISH_REASONS) + len(DROP_REASONS) + 3 * (len(LONG_BOUNDS) + 2) + len(SHORT_BOUNDS) + 2
    SIZE += len(FRONT_END_PHASES) + GcPauses.SIZE
    """Numbers in a row, without `loads`, which adds one per replica."""

    def __init__(self, cells: memoryview[float]) -> None:
        """cells: the row, `SIZE` numbers and one per replica."""
        self._cells = cells
        self.loads = cells[self.SIZE :]
        """This front end's load on each replica, tokens (server/front_end/routing.py)."""
        at = NUM_SINGLE
        self._finished = cells[at : at + len(FINISH_REASONS)]
        at += len(FINISH_REASONS)
        self._dropped = cells[at : at + len(DROP_REASONS)]
        at += len(DROP_REASONS)
        histograms = []
        for bounds in (LONG_BOUNDS, LONG_BOUNDS, LONG_BOUNDS, SHORT_BOUNDS):
            histograms.append(Histogram(bounds, cells[at : at + len(bounds) + 2]))
            at += len(bounds) + 2
        self.time_to_first_token, self.queue_time, self.request_latency, self.inter_token_latency = histograms
        self.phase_cells = cells[at : at + len(FRONT_END_PHASES)]
        """CPU seconds of each of FRONT_END_PHASES; all 0 unless server.phase_times."""
        at += len(FRONT_END_PHASES)
        self.gc_pauses = GcPauses(cells[at : at + GcPauses.SIZE])
        """Garbage collections of the front end."""

    @property
    def open_requests(self) -> int:
        """Number of requests sent to the engine that have not ended."""
        return int(self._cells[OPEN_REQUESTS])

    @open_requests.setter
    def open_requests(self, count: int) -> None:
        self._cells[OPEN_REQUESTS] = count

    @property
    def connections(self) -> int:
        """Number of open client connections."""
        return int(self._cells[CONNECTIONS])

    @connections.setter
    def connections(self, count: int) -> None:
        self._cells[CONNECTIONS] = count

    @property
    def closed_connections(self) -> int:
        """Number of client connections that have ended."""
        return int(self._cells[CLOSED_CONNECTIONS])

    def count_closed_connections(self, count: int = 1) -> None:
        """Count client connections that have ended."""
        self._cells[CLOSED_CONNECTIONS] += count

    @property
    def dropped(self) -> dict[str, int]:
        """Number of dropped connections by reason."""
        return {reason: int(count) for reason, count in zip(DROP_REASONS, self._dropped, strict=True)}

    def count_dropped(self, reason: DropReason, count: int = 1) -> None:
        """Count dropped connections."""
        self._dropped[DROP_REASONS.index(reason)] += count

    @property
    def heartbeats(self) -> float:
        """Number of heartbeats: changes every `HEARTBEAT_INTERVAL` while the front end's event loop runs."""
        return self._cells[HEARTBEATS]

    def beat(self) -> None:
        """Record that the event loop runs."""
        self._cells[HEARTBEATS] += 1

    @property
    def finished(self) -> dict[str, int]:
        """Number of ended requests by finish reason."""
        return {reason: int(count) for reason, count in zip(FINISH_REASONS, self._finished, strict=True)}

    def count_finished(self, reason: str, count: int = 1) -> None:
        """Count ended requests; reason: one of FINISH_REASONS."""
        self._finished[FINISH_REASONS.index(reason)] += count

    def observe_tokens(self, seconds: float, count: int, first: bool) -> None:
        """Observe `count` tokens of a request that came `seconds` after its previous ones; first: after its arrival."""
        if first:
            self.time_to_first_token.observe(seconds)
        else:
            self.inter_token_latency.observe(seconds / count, count)

    def observe_finish(self, reason: str, times: RequestTimes | None, seconds: float) -> None:
        """Count a request that finished `seconds` after its arrival."""
        self.count_finished(reason)
        self.request_latency.observe(seconds)
        if times is not None:
            self.queue_time.observe(max(0.0, times.scheduled - times.arrival))

    def abort_open_requests(self) -> None:
        """Count the open requests as aborted, and clear the gauges; for the row of a front end that has exited."""
        self.connections = 0
        self.count_finished(FINISH_ABORT, self.open_requests)
        self.open_requests = 0
        for replica in range(len(self.loads)):
            self.loads[replica] = 0.0


class MetricsTable:
    """The rows of all front ends."""

    def __init__(self, cells: Sequence[memoryview[float]]) -> None:
        """cells: the numbers of each row."""
        self._cells = cells
        self.rows = [FrontEndMetrics(row) for row in cells]

    @classmethod
    def map(cls, file: Path, num_rows: int, replicas: int, *, create: bool = False) -> MetricsTable:
        """Map the table in `file`; create: make the file first."""
        size = FrontEndMetrics.SIZE + replicas
        if create:
            file.write_bytes(bytes(8 * size * num_rows))
        with file.open("r+b") as opened:
            cells = memoryview(mmap.mmap(opened.fileno(), 8 * size * num_rows)).cast("d")
        return cls([cells[size * row : size * (row + 1)] for row in range(num_rows)])

    @property
    def open_requests(self) -> int:
        """Number of requests in the engine, of all front ends."""
        return sum(row.open_requests for row in self.rows)

    @property
    def loads(self) -> list[float]:
        """Load of each replica, tokens, of all front ends."""
        return [sum(loads) for loads in zip(*(row.loads for row in self.rows), strict=True)]

    def total(self) -> FrontEndMetrics:
        """A snapshot of the sum of all rows."""
        return FrontEndMetrics(memoryview(array("d", map(sum, zip(*self._cells, strict=True)))))
