"""What a front end knows of all engine replicas, polled every second, and the service that its routes use."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import attrs

from engine.core.executors import MessageDecoder
from engine.core.types import CacheInfo, EngineStats, HistogramCounts, SpeculationStats
from engine.server.http.service import Service
from engine.server.metrics.reports import EngineReport
from engine.server.ray_serve.messages import ReplicaState
from engine.server.shared.heartbeat import Fault

POLL_SECONDS = 1.0
"""Seconds between two reports of the replicas."""

log = logging.getLogger(__name__)


class ClusterState:
    """The latest report of each engine replica."""

    def __init__(self, engines: Any, timeout: float) -> None:
        """engines: Ray's handle of the deployment. timeout: server.health_timeout."""
        self.reports: Sequence[ReplicaState] = ()
        """Reports of the replicas that have answered, sorted by their ids."""
        self._engines = engines
        self._timeout = timeout
        self._since = time.time()
        self._decoder: MessageDecoder[ReplicaState] = MessageDecoder(ReplicaState)

    def fault(self) -> Fault | None:
        """Why no replica can answer requests; None: at least one can."""
        faults = [report.fault for report in self.reports]
        if not faults:
            return Fault(level="process", reason="no replica of the engine is running", since=self._since)
        return None if None in faults else faults[0]

    async def ask(self, method: str) -> list[ReplicaState]:
        """Call a method of all replicas that returns a report; those that answer in time."""
        try:
            answers = await self._engines.broadcast(method).results_async(
                timeout_s=self._timeout, return_exceptions=True
            )
        except Exception as error:  # Ray has several: no replica is known, or one does not answer
            log.warning("the replicas of the engine do not report: %s", error)
            return []
        reports = [self._decoder.decode(answer) for answer in answers if isinstance(answer, bytes)]
        return sorted(reports, key=lambda report: report.replica)

    async def update(self) -> None:
        """Ask all replicas for their reports."""
        reports = await self.ask("report")
        if self.reports and not reports:
            self._since = time.time()
        self.reports = reports


class RayService(Service):
    """The service of a front end whose replicas are Ray Serve's; their number changes."""

    state: ClusterState
    cache: CacheInfo
    """The KV cache of one replica."""

    @property
    def supervisor(self) -> int:
        return 0  # the parent is a process of Ray

    def engine_reports(self) -> Sequence[EngineReport]:
        # One for all, since the number of series must not change with that of replicas.
        stats = merged([report.stats for report in self.state.reports])
        return [
            EngineReport(
                up=self.state.fault() is None,
                stats=stats,
                startup=self.cache.phases,
                cache=self.cache,
                prefix_caching=self._prefix_caching,
            )
        ]

    def faults(self) -> Sequence[Fault | None]:
        return [report.fault for report in self.state.reports] or [self.state.fault()]

    async def probe(self) -> Sequence[float | Fault]:
        reports = await self.state.ask("probe")
        states: list[float | Fault] = []
        for report in reports:
            if report.fault is not None:
                states.append(report.fault)
            elif report.step_seconds is not None:
                states.append(report.step_seconds)
        missing = Fault(level="process", reason="no replica of the engine answers", since=time.time())
        return states or [missing]


OF_ONE_ENGINE = frozenset({"cache", "kv_events", "work", "peaks", "gc_pauses", "graph_replays", "graph_misses"})
"""Statistics that are of use for one engine alone, or have no sum: left out."""


def merged(stats: Sequence[EngineStats]) -> EngineStats:
    """The sum of the statistics of several engines, without those of OF_ONE_ENGINE."""
    return EngineStats(
        speculation=_speculation([one.speculation for one in stats if one.speculation is not None]),
        **{
            field.name: _sum([getattr(one, field.name) for one in stats], getattr(EngineStats(), field.name))
            for field in attrs.fields(EngineStats)
            if field.name not in OF_ONE_ENGINE and field.name != "speculation"
        },
    )


def _speculation(stats: Sequence[SpeculationStats]) -> SpeculationStats | None:
    """The sum over engines that speculate; None: none does."""
    if not stats:
        return None
    verified, accepted = (
        tuple(map(sum, zip_longest(*columns, fillvalue=0)))
        for columns in ([one.verified for one in stats], [one.accepted for one in stats])
    )
    return SpeculationStats(verified=verified, accepted=accepted, faults=sum(one.faults for one in stats))


def _sum(values: Sequence[Any], zero: Any) -> Any:
    """The sum of numbers, of histograms, or of tables of (name, number, ...) by their names. zero: that of the type."""
    if isinstance(zero, int | float):
        return sum(values, zero)
    if isinstance(zero, HistogramCounts):
        counts = [value.counts for value in values if value.counts]
        return HistogramCounts(tuple(map(sum, zip(*counts, strict=True))), sum(value.sum for value in values))
    if isinstance(zero, tuple):
        rows: dict[str, tuple[float, ...]] = {}
        for name, *numbers in (row for value in values for row in value):
            rows[name] = tuple(map(sum, zip(rows.get(name, (0,) * len(numbers)), numbers, strict=True)))
        return tuple((name, *numbers) for name, numbers in rows.items())
    raise TypeError(f"statistics of the type {type(zero).__name__} cannot be summed")
