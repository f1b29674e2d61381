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
    """None in a group of states."""
    plan: Any
    """The backend's plan for the batch."""
    pool: KVPool
    """The pool of the cache group; in a group of states, a StatePool."""
    groups: tuple[ForwardPass, ...] = ()
    """The passes of several cache groups; this one is then the first group's. Empty: all layers are of one group."""

    def of_group(self, number: int) -> ForwardPass:
        """The pass of a layer's cache group. number: from LayerFactory.cache_place."""
        return self.groups[number] if self.groups else self
