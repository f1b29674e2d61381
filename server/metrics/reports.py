"""What /metrics is written from: what is known of each replica and of the server."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from engine.core.types import CacheInfo, EngineStats
from engine.server.shared.metrics_table import FrontEndMetrics
from engine.server.shared.request_metrics import ReplicaMetrics


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
    prefix_caching: bool = False
    """Whether the blocks of equal prefixes are reused."""
    pid: int = 0
    """Process ID of the engine process; 0 before the first start."""


@frozen(kw_only=True)
class ReplicaReport:
    """An engine, and what all front ends together have counted of the requests to it."""

    engine: EngineReport
    requests: ReplicaMetrics


Route = tuple[str, str]
"""(HTTP method, path with its parameters in braces)."""


@frozen(kw_only=True)
class ServerReport:
    """What all front ends together count that belongs to no replica."""

    counts: FrontEndMetrics
    """The sum of their rows."""
    routes: Sequence[Route] = ()
    """The route of each slot of `counts.http`; further slots are unused."""
