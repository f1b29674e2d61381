"""Ranks that share a model, in tests: one without the others, and several as threads of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engine.core.device import DeviceInfo
from engine.core.distributed import OneRank, RankGroup, Rendezvous, join

T = TypeVar("T")


class LoneRank(OneRank):
    """One of several ranks, whose sums are its own part of them: for tests of what a rank holds and computes."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks


def run_ranks(ranks: int, work: Callable[[RankGroup], T], *, timeout: float = 60.0) -> list[T]:
    """What `work` returns on each of several ranks, by rank: threads on the CPU, joined by gloo as processes would be.

    The first rank's error is raised. timeout: seconds that a rank waits for one that does not come.
    """
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(ranks) as threads:
        path = str(Path(directory) / "ranks")

        def run(rank: int) -> T:
            group = join(Rendezvous(rank=rank, ranks=ranks, path=path, timeout=timeout), DeviceInfo(type="cpu"))
            try:
                return work(group)
            finally:
                group.close()

        futures = [threads.submit(run, rank) for rank in range(ranks)]
        return [future.result() for future in futures]
