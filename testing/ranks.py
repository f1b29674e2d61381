"""Ranks that share a model, for tests: a single one without the others, and several as threads of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs

from engine.core.device import DeviceInfo
from engine.core.distributed import OneRank, RankGroup, Rendezvous, join
from engine.core.executors import Deployment, Executor, Health, PendingResult
from engine.core.runner import Runner

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.core.types import CacheInfo, Step, StepResult

S = TypeVar("S")
T = TypeVar("T")
CPU = DeviceInfo(type="cpu")


class LoneRank(OneRank):
    """One of several ranks, without the others: an all-reduce returns the rank's own addend."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks


def run_ranks(
    ranks: int, work: Callable[[RankGroup], T], *, timeout: float = 60.0, place: str | None = None
) -> list[T]:
    """Run `work` on several ranks and return its results by rank. The ranks are threads on the CPU, joined by gloo.

    Raises the error of the lowest rank that fails. timeout: seconds that a rank waits for the others. place: see
    Rendezvous; by default a temporary file.
    """
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(ranks) as threads:
        meeting = place or str(Path(directory) / "ranks")

        def run(rank: int) -> T:
            group = join(Rendezvous(rank=rank, ranks=ranks, place=meeting, timeout=timeout), CPU)
            try:
                return work(group)
            finally:
                group.close()

        futures = [threads.submit(run, rank) for rank in range(ranks)]
        return [future.result() for future in futures]


def threaded_ranks(number: int) -> type[ThreadedRanks]:
    """An executor class with that number of ranks, for the `executor` argument of Engine."""

    class Made(ThreadedRanks):
        ranks = number

    return Made


class ThreadedRanks(Executor):
    """Runners on the CPU that share the model, each in a thread. Asserts that all return the same results."""

    api = "2"
    ranks: ClassVar[int]

    @classmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        """Refuses any device but a CPU."""
        return None if device.type == "cpu" else "it is for tests on a CPU; use --device cpu"

    def __init__(self, deployment: Deployment, options: Any) -> None:
        self._deployment = deployment
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._threads: list[ThreadPoolExecutor] = []
        self._groups: list[RankGroup] = []
        self.runners: list[Runner] = []

    @property
    def asynchronous(self) -> bool:
        return False

    def start(self) -> CacheInfo:
        self._directory = tempfile.TemporaryDirectory()
        self._threads = [ThreadPoolExecutor(1) for _ in range(self.ranks)]
        path = str(Path(self._directory.name) / "ranks")
        try:
            self._groups = self._on_each(
                lambda rank: join(Rendezvous(rank=rank, ranks=self.ranks, place=path, timeout=60.0), CPU),
                range(self.ranks),
            )
            self.runners = [self._deployment.make_runner(group) for group in self._groups]
            infos = self._on_each(lambda runner: runner.start(), self.runners)
        except BaseException:
            self.shutdown()
            raise
        assert len({info.num_blocks for info in infos}) == 1
        return infos[0]

    def submit(self, step: Step) -> PendingResult:
        return _Done(self._on_each(lambda runner: runner.launch(step).result(), self.runners))

    def check(self) -> Health:
        return Health(ok=True)

    def shutdown(self) -> None:
        for group in self._groups:
            group.close()
        for thread in self._threads:
            thread.shutdown()
        if self._directory is not None:
            self._directory.cleanup()
        self._groups, self._threads = [], []

    def _on_each(self, work: Callable[[S], T], items: Iterable[S]) -> list[T]:
        futures = [thread.submit(work, item) for thread, item in zip(self._threads, items, strict=True)]
        return [future.result() for future in futures]


class _Done:
    """The results of one step on all ranks."""

    def __init__(self, results: list[StepResult]) -> None:
        self._results = results

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        bare = [attrs.evolve(result, seconds=()) for result in self._results]
        assert all(other == bare[0] for other in bare), "the ranks have different results"
        return self._results[0]
