"""Cache groups: which layers share block tables, and which groups share memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from engine.core.attention.base import AttentionSpec

if TYPE_CHECKING:
    import torch

    from engine.core.attention.kv_pool import KVPool
    from engine.core.attention.state_pool import StateTensors
    from engine.core.quant.float8 import KVScales
    from engine.core.types import BlockKind

MAX_GROUPS = 8
"""Maximum number of cache groups, unless a model has more kinds of layers. More groups waste less memory, but each
costs a block table and a plan."""


@frozen(kw_only=True)
class CacheGroup:
    """Layers of one kind and shape that share block tables."""

    layers: tuple[int, ...]
    spec: AttentionSpec


@frozen(kw_only=True)
class StateGroup:
    """Layers with states of one shape."""

    layers: tuple[int, ...]
    tensors: StateTensors


@frozen(kw_only=True)
class CacheLayout:
    """The cache groups of a model on one rank."""

    kinds: tuple[BlockKind, ...]
    """The groups of the first kind come first, then those of the second, and so on."""
    groups: tuple[CacheGroup, ...]
    states: tuple[StateGroup, ...]
    places: tuple[tuple[int, int], ...]
    """Per layer: number of its group (groups, then states), its index in the group."""

    @property
    def one(self) -> bool:
        """Whether all layers are of one group, as in most models."""
        return len(self.groups) + len(self.states) == 1

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in all pools; groups that share memory count once."""
        from engine.core.attention.kv_pool import KVPool

        return sum(max(KVPool.bytes_per_block(group.spec) for group in groups) for groups in self._by_memory())

    def state_bytes(self, max_running: int) -> int:
        """Bytes of the states of `max_running` sequences and of the padding row."""
        if not self.states:
            return 0
        from engine.core.attention.state_pool import StatePool

        each = sum(len(group.layers) * StatePool.bytes_per_sequence(group.tensors) for group in self.states)
        return (max_running + 1) * each

    def make_pools(
        self, num_blocks: int, device: torch.device | str, scales: Sequence[KVScales] = ()
    ) -> tuple[KVPool, ...]:
        """The KV pool of each group. scales: per layer of the model."""
        from engine.core.attention.kv_pool import KVPool

        pools: dict[int, KVPool] = {}
        for members in self._by_memory():
            largest = max(members, key=lambda group: len(group.layers))
            for group in (largest, *(group for group in members if group is not largest)):
                own = tuple(scales[layer] for layer in group.layers) if scales else ()
                shared = None if group is largest else pools[id(largest)]
                pool = pools[id(group)] = KVPool(group.spec, num_blocks, device, own, shared)
                if group is largest and any(kind.window is not None for kind in self.kinds):
                    for tensor in (*pool.keys, *pool.values):
                        if tensor.device.type != "cpu":  # there they are zero, and take no memory until written
                            tensor.zero_()  # so that memory behind the windows holds no NaN (AttentionBackend)
        return tuple(pools[id(group)] for group in self.groups)

    def _by_memory(self) -> list[list[CacheGroup]]:
        """The groups that share memory: those whose layers have blocks of the same size."""
        found: dict[tuple[int, int], list[CacheGroup]] = {}
        for group in self.groups:
            found.setdefault(group.spec.numbers_per_token, []).append(group)
        return list(found.values())


def divide_layers(counts: Mapping[bool, Sequence[int]]) -> int:
    """The number of layers that a block has room for: the maximum of a group.

    counts: numbers of layers of the kinds without a window (False) and with one (True). All groups share the blocks, so
    a group with fewer layers than the maximum wastes the rest of each of its blocks. Minimizes the waste of short
    contexts, for which all groups take blocks, plus that of long ones, for which only groups without a window do.
    """
    kinds = [*counts.get(False, ()), *counts.get(True, ())]
    long = counts.get(False, ()) or kinds

    def waste(size: int, kinds: Sequence[int]) -> float:
        return sum(-(-count // size) * size for count in kinds) / sum(kinds) - 1

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in kinds)

    limit = max(MAX_GROUPS, len(kinds))
    sizes = [size for size in range(1, max(kinds) + 1) if groups(size) <= limit]
    return min(sizes, key=lambda size: (round(waste(size, kinds) + waste(size, long), 6), groups(size)))
