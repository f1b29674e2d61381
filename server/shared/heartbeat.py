"""The engine's signs of life: a few numbers in a file that the engine process writes and the front ends read.

They tell what a process that is alive may still hide: a loop that hangs, or a device that computes nothing any more.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from attrs import frozen

from engine.core.executors import Health

FILE = "pulse-{}"
"""Its name in the server's directory, for a replica."""
BEAT, WORKER_BEAT, RANK, ASKED, PROVED = range(5)
CELLS = 5
"""Numbers in the file, eight bytes each: when the engine's loop went round last; when the loop of the slowest worker
that should be idle did; that worker's rank; when a proof was asked for that has not come yet; when a step was proved to
be computed. Times are time.monotonic(), which is the same in all processes; 0 is none."""


@frozen(kw_only=True)
class Fault:
    """What is wrong with an engine."""

    level: str
    """process (it is dead, or not ready yet), loop (it does not go round) or step (none is computed)."""
    reason: str
    since: float
    """time.time(), seconds."""
    starting: bool = False
    """Whether a dead process has a successor, which takes no requests yet."""
    restart: str = ""
    """What is done about it; empty where nothing ever is."""

    def body(self) -> dict[str, str]:
        """As /health answers it."""
        since = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="milliseconds")
        status = "starting" if self.starting else "failed"
        body = {"status": status, "level": self.level, "reason": self.reason, "since": since}
        return body | ({"restart": self.restart} if self.restart else {})


class Heartbeat:
    """The numbers, as one process maps them."""

    def __init__(self, cells: memoryview[float], clock: Callable[[], float] = time.monotonic) -> None:
        """cells: `CELLS` numbers."""
        self._cells = cells
        self._clock = clock

    @classmethod
    def map(cls, directory: str, replica: int, *, create: bool = False) -> Heartbeat:
        """The pulse of a replica of the server that has this directory; its first engine process makes the file, and
        each begins anew."""
        file = Path(directory) / FILE.format(replica)
        if create and not file.exists():
            file.write_bytes(bytes(8 * CELLS))
        with file.open("r+b") as opened:
            cells = memoryview(mmap.mmap(opened.fileno(), 8 * CELLS)).cast("d")
        if create:  # in place: front ends have mapped the file
            cells[:] = memoryview(bytes(8 * CELLS)).cast("d")
        return cls(cells)

    def beat(self, idle: Health | None) -> None:
        """The engine's loop goes round. idle: what the executor says, when there is nothing to compute."""
        workers = idle.heartbeat if idle is not None else None
        self._cells[WORKER_BEAT] = workers or 0.0
        self._cells[RANK] = idle.rank if idle is not None else 0
        self._cells[BEAT] = self._clock()

    def ask(self) -> None:
        """A proof is wanted that steps are computed."""
        self._cells[ASKED] = self._cells[ASKED] or self._clock()

    def prove(self) -> None:
        """Here it is."""
        self._cells[PROVED] = self._clock()
        self._cells[ASKED] = 0.0

    @property
    def proved(self) -> float:
        """When a step was last proved to be computed, time.monotonic()."""
        return self._cells[PROVED]

    def fault(self, limit: float) -> Fault | None:
        """What has not happened for more than `limit` seconds though it should."""
        cells = self._cells
        loops = [("the engine's loop", cells[BEAT]), (f"the loop of rank {cells[RANK]:.0f}", cells[WORKER_BEAT])]
        now = self._clock()
        for name, at in loops:
            if at and now - at > limit:
                return self._since("loop", f"{name} has not gone round for {now - at:.0f} s", at)
        asked = cells[ASKED]
        return self.no_step(asked) if asked and now - asked > limit else None

    def no_step(self, asked: float) -> Fault:
        """No step has been computed since `asked`."""
        seconds = self._clock() - asked
        return self._since("step", f"a step was asked for, and none has been computed for {seconds:.0f} s", asked)

    def _since(self, level: str, reason: str, at: float) -> Fault:
        return Fault(level=level, reason=reason, since=time.time() - (self._clock() - at))
