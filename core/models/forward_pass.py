"""The arguments of one forward pass of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.attention.batch import ForwardBatch
    from engine.core.attention.kv_pool import KVPool


@define(kw_only=True)
class ForwardPass:
    """The batch of one forward pass, and the attention backend and KV pool that serve it. Models pass it to layers."""

    batch: ForwardBatch
    attention: AttentionBackend[Any, Any]
    plan: Any
    pool: KVPool
