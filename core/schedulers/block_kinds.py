"""Numbers of KV blocks that contexts of a given length take, by kinds of layers."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.types import FULL, BlockKind

MAX_INDICES = 2**31
"""Stands for no limit on the indices of a block table."""


def is_plain(kinds: Sequence[BlockKind]) -> bool:
    """Whether all layers share one block table and keep the whole context."""
    return len(kinds) == 1 and (kinds[0].window, kinds[0].groups) == (FULL.window, FULL.groups)


def span(window: int | None, block_size: int, max_chunk: int) -> int:
    """Maximum entries of a sequence's block table: those of any chunk and of the window before it."""
    return MAX_INDICES if window is None else (window + max_chunk + block_size - 3) // block_size + 1


def blocks_needed(kinds: Sequence[BlockKind], length: int, block_size: int, max_chunk: int) -> int:
    """Maximum blocks of one sequence of `length` indices, prefilled in chunks of up to `max_chunk` tokens."""
    return sum(kind.groups * min(length, span(kind.window, block_size, max_chunk)) for kind in kinds)


def num_indices(kinds: Sequence[BlockKind], num_blocks: int) -> int:
    """Indices of block tables that `num_blocks` fill, if no window frees blocks."""
    blocks = sum(kind.groups for kind in kinds)
    return num_blocks // blocks if blocks else MAX_INDICES


def longest_context(kinds: Sequence[BlockKind], num_blocks: int, block_size: int, max_chunk: int) -> int:
    """Tokens of the longest sequence for which `num_blocks` are enough."""
    low, high = 0, num_blocks if any(kind.window is None for kind in kinds) else MAX_INDICES
    while low < high:
        length = (low + high + 1) // 2
        fits = blocks_needed(kinds, length, block_size, max_chunk) <= num_blocks
        low, high = (length, high) if fits else (low, length - 1)
    return low * block_size
