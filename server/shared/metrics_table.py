"""The metrics table: counters and histograms of all front ends, in a file that all of them map.

Each front end writes its own row and reads all rows, so any front end can answer /metrics for the whole server. A row
outlives the process that wrote it. Within a row, each replica has a part of its own for the requests that went to it.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from engine.core.gc_pauses import GcPauses
from engine.server.shared.request_metrics import FINISH_REASONS, Cells, HttpMetrics, ReplicaMetrics, by_name

DropReason = Literal["lost", "refused", "evicted", "invalid", "header_timeout", "body_timeout", "write_timeout"]
"""Why a front end drops a connection.

lost: no file descriptor was left to receive it; refused: server.max_connections were open; evicted: it was idle, and
another needed its place; invalid: the request is not HTTP or exceeds a limit of its head; the others: the timeout that
the server's setting of this name gives has passed.
"""
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)

Rejection = Literal["overloaded", "engine_failed", "rate_limit_exceeded", "shutting_down"]
"""The `code` of the error with which the server declines a request that it could serve at another time."""
REJECTIONS: tuple[Rejection, ...] = get_args(Rejection)

FrontEndPhase = Literal["http", "tokenize", "route", "deliver", "detokenize", "write"]
"""What a front end's event loop does.

http: all that is in no other phase: parsing and checking requests, responses that are not streamed, the event loop;
tokenize: chat templates and tokenizing, also in threads; route: choosing replicas and sending requests to them;
deliver: receiving the engine's messages; detokenize: from tokens to text and events; write: events to the sockets.
"""
FRONT_END_PHASES: tuple[FrontEndPhase, ...] = get_args(FrontEndPhase)

HEARTBEAT_INTERVAL = 0.5
"""Seconds between two heartbeats of a front end."""
CLOSED_CONNECTIONS, CONNECTIONS, HEARTBEATS, PID, LOST_TRACES, NUM_SINGLE = range(6)
"""Cells of a row that hold one number, and their number."""


class FrontEndMetrics:
    """One row of the metrics table: what one front end counts and measures."""

    _SIZE = NUM_SINGLE + len(DROP_REASONS) + len(REJECTIONS) + HttpMetrics.SIZE + len(FRONT_END_PHASES) + GcPauses.SIZE

    def __init__(self, cells: memoryview[float]) -> None:
        """cells: the row, `size` numbers."""
        self._cells = cells
        at = Cells(cells, NUM_SINGLE)
        self._dropped = at.take(len(DROP_REASONS))
        self._rejected = at.take(len(REJECTIONS))
        self.http = HttpMetrics(at.take(HttpMetrics.SIZE))
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
        return by_name(DROP_REASONS, self._dropped)

    def count_dropped(self, reason: DropReason, count: int = 1) -> None:
        """Count dropped connections."""
        self._dropped[DROP_REASONS.index(reason)] += count

    @property
    def rejected(self) -> dict[str, int]:
        """Number of requests declined for the time being, by the error's code."""
        return by_name(REJECTIONS, self._rejected)

    def count_rejected(self, code: str | None) -> None:
        """Count a request that is declined with this error code, if it is one of REJECTIONS."""
        if code in REJECTIONS:
            self._rejected[REJECTIONS.index(code)] += 1

    @property
    def pid(self) -> int:
        """Process ID of the front end; 0 before it has written anything."""
        return int(self._cells[PID])

    @pid.setter
    def pid(self, pid: int) -> None:
        self._cells[PID] = pid

    @property
    def heartbeats(self) -> float:
        """Number of heartbeats: changes every `HEARTBEAT_INTERVAL` while the front end's event loop runs."""
        return self._cells[HEARTBEATS]

    def beat(self) -> None:
        """Record that the event loop runs."""
        self._cells[HEARTBEATS] += 1

    @property
    def lost_traces(self) -> int:
        """Number of requests whose traces could not be sent."""
        return int(self._cells[LOST_TRACES])

    def count_lost_traces(self, count: int) -> None:
        """Count requests whose traces could not be sent."""
        self._cells[LOST_TRACES] += count

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
