"""The metrics table: counters and histograms of all front ends, in a file that all of them map.

Each front end writes its own row and reads all rows, so any front end can answer /metrics for the whole server. A row
outlives the process that wrote it. Within a row, each replica has a part of its own for the requests that went to it.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from engine.core.gc_pauses import GcPauses
from engine.core.types import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    FinishReason,
    HistogramCounts,
    RequestTimes,
)
from engine.server.metrics import buckets

FINISH_REASONS: tuple[FinishReason, ...] = (FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR)

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

HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": buckets.FIRST_TOKEN_SECONDS,
    "inter_token_latency_seconds": buckets.TOKEN_SECONDS,
    "request_queue_time_seconds": buckets.REQUEST_SECONDS,
    "e2e_request_latency_seconds": buckets.REQUEST_SECONDS,
}
"""Name of each histogram of requests -> its bucket bounds."""

HEARTBEAT_INTERVAL = 0.5
"""Seconds between two heartbeats of a front end."""
CLOSED_CONNECTIONS, CONNECTIONS, HEARTBEATS, NUM_SINGLE = range(4)
"""Cells of a row that hold one number, and their number."""
LOAD, OPEN_REQUESTS, NUM_SINGLE_OF_REPLICA = range(3)
"""Cells of a replica's part that hold one number, and their number."""


class Histogram:
    """Counts values in buckets; cheap enough to update once per token."""

    def __init__(self, bounds: tuple[float, ...], cells: memoryview[float]) -> None:
        """cells: one count per bound, one count beyond the last bound, and the sum."""
        self._bounds = bounds
        self._cells = cells

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._cells[bisect_left(self._bounds, value)] += count
        self._cells[-1] += value * count

    def snapshot(self) -> HistogramCounts:
        """The counts and the sum of the values."""
        return HistogramCounts(tuple(map(int, self._cells[:-1])), self._cells[-1])


class ReplicaMetrics:
    """What one front end counts of the requests it sent to one replica.

    The engine's own numbers come as EngineStats from the engine processes.
    """

    SIZE = NUM_SINGLE_OF_REPLICA + len(FINISH_REASONS) + sum(len(bounds) + 2 for bounds in HISTOGRAMS.values())
    """Numbers in a replica's part."""

    def __init__(self, cells: memoryview[float]) -> None:
        """cells: `SIZE` numbers."""
        self._cells = cells
        at = _Cells(cells, NUM_SINGLE_OF_REPLICA)
        self._finished = at.take(len(FINISH_REASONS))
        self.histograms = {name: Histogram(bounds, at.take(len(bounds) + 2)) for name, bounds in HISTOGRAMS.items()}
        self.inter_token_latency = self.histograms["inter_token_latency_seconds"]

    @property
    def load(self) -> float:
        """This front end's load on the replica, tokens (server/front_end/routing.py)."""
        return self._cells[LOAD]

    @load.setter
    def load(self, tokens: float) -> None:
        self._cells[LOAD] = tokens

    @property
    def open_requests(self) -> int:
        """Number of requests sent to the replica that have not ended."""
        return int(self._cells[OPEN_REQUESTS])

    @open_requests.setter
    def open_requests(self, count: int) -> None:
        self._cells[OPEN_REQUESTS] = count

    @property
    def finished(self) -> dict[str, int]:
        """Number of ended requests by finish reason."""
        return _by_name(FINISH_REASONS, self._finished)

    def count_finished(self, reason: str, count: int = 1) -> None:
        """Count ended requests; reason: one of FINISH_REASONS."""
        self._finished[FINISH_REASONS.index(reason)] += count

    def observe_tokens(self, seconds: float, count: int, first: bool) -> None:
        """Observe `count` tokens of a request that came `seconds` after its previous ones; first: after its arrival."""
        if first:
            self.histograms["time_to_first_token_seconds"].observe(seconds)
        else:
            self.inter_token_latency.observe(seconds / count, count)

    def observe_finish(self, reason: str, times: RequestTimes | None, seconds: float) -> None:
        """Count a request that finished `seconds` after its arrival."""
        self.count_finished(reason)
        self.histograms["e2e_request_latency_seconds"].observe(seconds)
        if times is not None:
            self.histograms["request_queue_time_seconds"].observe(max(0.0, times.scheduled - times.arrival))

    def abort_open_requests(self) -> None:
        """Count the open requests as aborted."""
        self.count_finished(FINISH_ABORT, self.open_requests)
        self.open_requests = 0
        self.load = 0.0


class FrontEndMetrics:
    """One row of the metrics table: what one front end counts and measures."""

    _SIZE = NUM_SINGLE + len(DROP_REASONS) + len(FRONT_END_PHASES) + GcPauses.SIZE

    def __init__(self, cells: memoryview[float]) -> None:
        """cells: the row, `size` numbers."""
        self._cells = cells
        at = _Cells(cells, NUM_SINGLE)
        self._dropped = at.take(len(DROP_REASONS))
        self.phase_cells = at.take(len(FRONT_END_PHASES))
        """CPU seconds of each of FRONT_END_PHASES; all 0 unless server.phase_times."""
        self.gc_pauses = GcPauses(at.take(GcPauses.SIZE))
        """Garbage collections of the front end."""
        self.replicas = [ReplicaMetrics(part) for part in at.parts(ReplicaMetrics.SIZE)]

    @classmethod
    def size(cls, replicas: int) -> int:
        """Numbers in a row."""
        return cls._SIZE + ReplicaMetrics.SIZE * replicas

    @property
    def open_requests(self) -> int:
        """Number of requests sent to the engines that have not ended."""
        return sum(replica.open_requests for replica in self.replicas)

    @property
    def finished(self) -> dict[str, int]:
        """Number of ended requests by finish reason, of all replicas."""
        return {reason: sum(replica.finished[reason] for replica in self.replicas) for reason in FINISH_REASONS}

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
        return _by_name(DROP_REASONS, self._dropped)

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

    def abort_open_requests(self) -> None:
        """Count the open requests as aborted, and clear the gauges; for the row of a front end that has exited."""
        self.connections = 0
        for replica in self.replicas:
            replica.abort_open_requests()


class MetricsTable:
    """The rows of all front ends."""

    def __init__(self, cells: Sequence[memoryview[float]]) -> None:
        """cells: the numbers of each row."""
        self._cells = cells
        self.rows = [FrontEndMetrics(row) for row in cells]

    @classmethod
    def map(cls, file: Path, num_rows: int, replicas: int, *, create: bool = False) -> MetricsTable:
        """Map the table in `file`; create: make the file first."""
        size = FrontEndMetrics.size(replicas)
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
        return [
            sum(replica.load for replica in parts) for parts in zip(*(row.replicas for row in self.rows), strict=True)
        ]

    def total(self) -> FrontEndMetrics:
        """A snapshot of the sum of all rows."""
        return FrontEndMetrics(memoryview(array("d", map(sum, zip(*self._cells, strict=True)))))


class _Cells:
    """Divides a row into parts, from a position on."""

    def __init__(self, cells: memoryview[float], start: int) -> None:
        self._cells = cells
        self._at = start

    def take(self, count: int) -> memoryview[float]:
        """The next `count` numbers."""
        self._at += count
        return self._cells[self._at - count : self._at]

    def parts(self, size: int) -> Iterator[memoryview[float]]:
        """All that is left, in parts of `size` numbers."""
        while self._at < len(self._cells):
            yield self.take(size)


def _by_name(names: Sequence[str], cells: memoryview[float]) -> dict[str, int]:
    return {name: int(count) for name, count in zip(names, cells, strict=True)}
