"""What /metrics knows of one replica."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from engine.core.types import CacheInfo, EngineStats
from engine.server.shared.metrics_table import ReplicaMetrics


@frozen(kw_only=True)
class EngineReport:
    """State and statistics of one replica's engine."""

    up: bool
    """Whether the replica accepts requests."""
    stats: EngineStats
    startup: Sequence[tuple[str, float]] = ()
    """(phase, seconds) of the latest start."""
    restarts: int = 0
    """Number of restarts."""
    cache: CacheInfo | None = None
    """The KV cache; None before the first start."""


@frozen(kw_only=True)
class ReplicaReport:
    """An engine, and what all front ends together have counted of the requests to it."""

    engine: EngineReport
    requests: ReplicaMetrics
