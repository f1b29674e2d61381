"""Attention: the contract of a backend, the batch and the KV cache it reads."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.attention.base import (
        AttentionBackend as AttentionBackend,
        AttentionSpec as AttentionSpec,
        GraphSlot as GraphSlot,
        window_of as window_of,
    )
    from engine.core.attention.batch import ForwardBatch as ForwardBatch
    from engine.core.attention.kv_pool import KVPool as KVPool

__getattr__, __dir__, __all__ = exports(
    __name__,
    base=(
        "AttentionBackend",
        "AttentionSpec",
        "GraphSlot",
        "window_of",
    ),
    batch=("ForwardBatch",),
    kv_pool=("KVPool",),
)
