"""Scheduling: the contract of a policy, and the scheduler that plans steps accordingly."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.schedulers.block_manager import BlockManager as BlockManager
    from engine.core.schedulers.cache_metrics import CacheMetrics as CacheMetrics
    from engine.core.schedulers.cache_observer import CacheObserver as CacheObserver, join_observers as join_observers
    from engine.core.schedulers.hash_chain import DigestCache as DigestCache, HashChain as HashChain
    from engine.core.schedulers.policy import (
        API as API,
        RequestView as RequestView,
        SchedulingPolicy as SchedulingPolicy,
        Split as Split,
    )
    from engine.core.schedulers.scheduler import Scheduler as Scheduler

__getattr__, __dir__, __all__ = exports(
    __name__,
    block_manager=("BlockManager",),
    cache_metrics=("CacheMetrics",),
    cache_observer=("CacheObserver", "join_observers"),
    hash_chain=("DigestCache", "HashChain"),
    policy=(
        "API",
        "RequestView",
        "SchedulingPolicy",
        "Split",
    ),
    scheduler=("Scheduler",),
)
