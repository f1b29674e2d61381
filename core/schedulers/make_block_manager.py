"""Makes the block manager that a KV cache needs."""

from __future__ import annotations

from engine.core.schedulers.block_kinds import is_plain
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.cache_observer import CacheObserver
from engine.core.schedulers.grouped_block_manager import GroupedBlockManager
from engine.core.types import CacheInfo


def make_block_manager(
    cache: CacheInfo, *, max_chunk: int, prefix_caching: bool, observer: CacheObserver | None = None
) -> BlockManager:
    """The block manager of a KV cache. max_chunk: maximum tokens of a prefill chunk. observer: see BlockManager."""
    kinds, size = cache.kinds, cache.block_size
    prefix_caching = prefix_caching and not cache.states  # a state holds the last computed token only
    if is_plain(kinds):
        return BlockManager(cache.num_blocks, size, prefix_caching=prefix_caching, observer=observer)
    return GroupedBlockManager(
        cache.num_blocks, size, kinds, max_chunk=max_chunk, prefix_caching=prefix_caching, observer=observer
    )
