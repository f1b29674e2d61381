"""Attention: the contract of a backend, the batch and the KV cache it reads."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.attention.base import (
        AttentionBackend as AttentionBackend,
        AttentionSpec as AttentionSpec,
        GraphSlot as GraphSlot,
        GraphSupport as GraphSupport,
        HeadRotation as HeadRotation,
        layers_by_window as layers_by_window,
    )
    from engine.core.attention.batch import ForwardBatch as ForwardBatch
    from engine.core.attention.groups import (
        CacheGroup as CacheGroup,
        CacheLayout as CacheLayout,
        StateGroup as StateGroup,
    )
    from engine.core.attention.kv_pool import KVPool as KVPool
    from engine.core.attention.pair import AttentionPair as AttentionPair
    from engine.core.attention.state_pool import StatePool as StatePool

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "AttentionBackend",
        "AttentionSpec",
        "GraphSlot",
        "GraphSupport",
        "HeadRotation",
        "layers_by_window",
    ),
    batch=("ForwardBatch",),
    groups=(
        "CacheGroup",
        "CacheLayout",
        "StateGroup",
    ),
    kv_pool=("KVPool",),
    pair=("AttentionPair",),
    state_pool=("StatePool",),
)
