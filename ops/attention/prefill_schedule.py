"""Which tiles of prefill attention each program of persistent_short computes, and in which order."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

TILE_COST = 1
"""What a tile costs beyond its blocks of keys, in blocks: queries are loaded and results stored."""
_SINGLE_TURNS = 3
"""Tiles per program that are assigned one by one; those before, which are longer, in turns of one per program."""


def prefill_schedule(
    tiles: npt.NDArray[np.int32], kv_heads: int, programs: int, block_n: int, *, window: int | None = None
) -> npt.NDArray[np.int32]:
    """Assign work items, each a tile of `prefill_tiles` and a KV head, to the least loaded program, longest first.

    programs: maximum number of programs; block_n: keys per block.
    Returns [turns + 2, programs, 4] int32: first the number of items of each program; then in each turn sequence *
    kv_heads + head, position of the tile's first token, its row of q, number of tokens; zeros behind the last item.
    """
    begins = 0 if window is None else np.maximum(tiles[:, 1] + 1 - window, 0) // block_n
    blocks = -(-(tiles[:, 1] + tiles[:, 3]) // block_n) - begins
    order = np.argsort(-blocks, kind="stable")
    work = np.repeat(blocks[order] + TILE_COST, kv_heads)
    programs = min(programs, len(work))
    owners = _assign(work, programs)
    counts = np.bincount(owners, minlength=programs)
    by_owner = np.argsort(owners, kind="stable")
    turns = np.empty(len(work), np.int64)
    turns[by_owner] = np.arange(len(work)) - np.repeat(np.cumsum(counts) - counts, counts)
    items = np.repeat(tiles[order], kv_heads, axis=0)
    items[:, 0] = items[:, 0] * kv_heads + np.tile(np.arange(kv_heads), len(tiles))
    schedule = np.zeros((counts.max() + 2, programs, 4), np.int32)
    schedule[0, :, 0] = counts
    schedule[turns + 1, owners] = items
    return schedule


def _assign(work: npt.NDArray[np.int64], programs: int) -> npt.NDArray[np.int64]:
    """The program of each item. work: of the items, in descending order."""
    owners = np.empty(len(work), np.int64)
    load = np.zeros(programs, np.int64)
    first_single = max(len(work) // programs - _SINGLE_TURNS, 0) * programs
    for begin in range(0, first_single, programs):
        idle = np.argsort(load, kind="stable")
        owners[begin : begin + programs] = idle
        load[idle] += work[begin : begin + programs]
    loads = list(zip(load.tolist(), range(programs), strict=True))
    heapify(loads)
    for number, amount in enumerate(work[first_single:].tolist(), first_single):
        least, program = loads[0]
        owners[number] = program
        heapreplace(loads, (least + amount, program))
    return owners
