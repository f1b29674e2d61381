"""What a model is given for one forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.attention.batch import ForwardBatch
    from engine.core.attention.kv_pool import KVPool


@define(kw_only=True)
class ForwardPass:
    """All that a model's layers need for one pass, handed down as an argument."""

    batch: ForwardBatch
    attention: AttentionBackend[Any, Any]
    plan: Any
    pool: KVPool
