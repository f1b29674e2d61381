"""Sorts (token, expert) pairs by expert, and divides each expert's pairs into tiles of rows, all on the device.

Numbers of tiles depend on the routing, which only the device knows. Grids have one program per tile of the worst case;
the tiles that are not used come last and say so.

Up to MAX_FEW pairs, one program places all tiles, and each of the others places FEW_PLACED pairs by comparing them with
all pairs.

With more pairs, each program places the pairs of one block, and some tiles. It needs the number of pairs of each
expert, in total and before its block. Up to MAX_COUNTED pairs, each program counts all of them; with more, a preceding
kernel counts those of each block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.common.launch import dependent_launch, release, wait

BLOCK = 256
"""Pairs that a program places."""
COUNTED = 1024
"""Pairs that are counted at a time."""
COMPARED = 32
"""Pairs of a block that are compared with the whole block at a time."""
TILES = 32
"""Maximum number of tiles that a program places. Enough programs are launched for that, some perhaps without pairs."""
MAX_COUNTED = 8192
"""Maximum number of pairs of which each program counts all."""
MAX_FEW = 4096
"""Maximum number of pairs of which each is compared with all."""
FEW_PLACED = 16
"""Pairs that a program places where there are at most MAX_FEW: few enough that 2,048 pairs fill the device."""
FEW_COMPARED = 128
"""Pairs that these are compared with at a time."""
MIN_BINS = 32
"""Minimum bins of a histogram, so that each thread of a warp has one."""


@frozen(eq=False)
class SortedPairs:
    """Pairs in the order of their experts. A pair's number: token * top_k + slot; pairs of other ranks are left out."""

    order: torch.Tensor
    """[pairs] int32: the pair in each row."""
    tile_experts: torch.Tensor
    """[tiles] int32: each tile's expert. -1: the tile is not used."""
    tile_begins: torch.Tensor
    """[tiles] int32: each tile's first row."""
    tile_ends: torch.Tensor
    """[tiles] int32: the end of its expert's rows."""
    tile_firsts: torch.Tensor
    """[tiles] int32: number of the first tile of its expert."""
    used_tiles: torch.Tensor
    """[1] int32: number of tiles that are used."""
    claims: torch.Tensor
    """[2] int32, zeros: counters of the persistent kernel, which leaves them zero."""


@triton.jit
def _count_kernel(counts, experts, pairs, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr):
    """counts: [blocks, BLOCK_E], the pairs of each expert in each block. Grid: (blocks,)."""
    release(PDL)
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    ids = tl.load(experts + pair, mask=pair < pairs, other=-1)
    tl.store(counts + block * BLOCK_E + tl.arange(0, BLOCK_E), tl.histogram(ids, BLOCK_E, ids >= 0))


@triton.jit
def _sort_kernel(
    order,
    tile_experts,
    tile_begins,
    tile_ends,
    tile_firsts,
    used_tiles,
    claims,
    experts,
    counts,
    pairs,
    num_experts,
    num_tiles,
    program_tiles,
    TILE_ROWS: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    COUNTED: tl.constexpr,
    COMPARED: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Place the pairs of a block, and `program_tiles` tiles. Grid: (blocks,). COUNTS: `counts` holds each block's."""
    release(PDL)
    block = tl.program_id(0)
    index = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    wait(PDL)
    if COUNTS:
        few = tl.arange(0, COMPARED)
        blocks = tl.num_programs(0)
        for begin in range(0, blocks, COMPARED):
            other = begin + few
            found = tl.load(counts + other[:, None] * BLOCK_E + index[None, :], mask=(other < blocks)[:, None], other=0)
            total += tl.sum(found, axis=0)
            before += tl.sum(tl.where((other < block)[:, None], found, 0), axis=0)
    else:
        for begin in range(0, pairs, COUNTED):
            pair = begin + tl.arange(0, COUNTED)
            ids = tl.load(experts + pair, mask=pair < pairs, other=-1)
            total += tl.histogram(ids, BLOCK_E, ids >= 0)
            before += tl.histogram(ids, BLOCK_E, (ids >= 0) & (pair < block * BLOCK))
    first = tl.cumsum(total, axis=0) - total
    used = (total + TILE_ROWS - 1) // TILE_ROWS
    end = tl.cumsum(used, axis=0)
    tl.store(used_tiles, tl.sum(used, axis=0), mask=block == 0)
    tl.store(claims + tl.arange(0, 2), 0, mask=block == 0)

    # Tiles: the expert of a tile is the number of experts whose tiles all come before it.
    for begin in range(0, program_tiles, TILES):
        number = begin + tl.arange(0, TILES)
        tile = block * program_tiles + number
        expert = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        its = index[None, :] == expert[:, None]
        first_tile = tl.sum(tl.where(its, (end - used)[None, :], 0), axis=1)
        row = tl.sum(tl.where(its, first[None, :], 0), axis=1) + (tile - first_tile) * TILE_ROWS
        last = tl.sum(tl.where(its, (first + total)[None, :], 0), axis=1)
        here = (number < program_tiles) & (tile < num_tiles)
        tl.store(tile_experts + tile, tl.where(expert < num_experts, expert, -1), mask=here)
        tl.store(tile_begins + tile, row, mask=here)
        tl.store(tile_ends + tile, last, mask=here)
        tl.store(tile_firsts + tile, first_tile, mask=here)

    # Pairs: a pair's row comes after its expert's pairs in earlier blocks, and earlier in this one.
    lane = tl.arange(0, BLOCK)
    ids = tl.load(experts + block * BLOCK + lane, mask=block * BLOCK + lane < pairs, other=-1)
    row = tl.gather(first + before, tl.where(ids >= 0, ids, 0), axis=0)
    for begin in range(0, BLOCK, COMPARED):
        other = begin + tl.arange(0, COMPARED)
        other_ids = tl.load(experts + block * BLOCK + other, mask=block * BLOCK + other < pairs, other=-1)
        earlier = (other_ids[None, :] == ids[:, None]) & (other[None, :] < lane[:, None])
        row += tl.sum(earlier.to(tl.int32), axis=1)
    tl.store(order + row, block * BLOCK + lane, mask=ids >= 0)


@triton.jit
def _sort_few_kernel(
    order,
    tile_experts,
    tile_begins,
    tile_ends,
    tile_firsts,
    used_tiles,
    claims,
    experts,
    pairs,
    num_tiles,
    TILE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    PLACED: tl.constexpr,
    COMPARED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `_sort_kernel`: the first program places all tiles, each of the others PLACED pairs.

    Grid: (1 + groups of PLACED pairs,). PAIRS: a power of two, at least `pairs`.
    """
    release(PDL)
    block = tl.program_id(0)
    wait(PDL)
    if block == 0:
        pair = tl.arange(0, PAIRS)
        ids = tl.load(experts + pair, mask=pair < pairs, other=-1)
        index = tl.arange(0, BLOCK_E)
        total = tl.histogram(ids, BLOCK_E, ids >= 0)
        first = tl.cumsum(total, axis=0) - total
        used = (total + TILE_ROWS - 1) // TILE_ROWS
        first_tile = tl.cumsum(used, axis=0) - used
        all_used = tl.sum(used, axis=0)
        tl.store(used_tiles, all_used)
        tl.store(claims + tl.arange(0, 2), 0)
        for number in range(tl.max(used, axis=0)):
            has = number < used
            tile = first_tile + number
            tl.store(tile_experts + tile, index, mask=has)
            tl.store(tile_begins + tile, first + number * TILE_ROWS, mask=has)
            tl.store(tile_ends + tile, first + total, mask=has)
            tl.store(tile_firsts + tile, first_tile, mask=has)
        for begin in range(0, num_tiles, BLOCK_E):
            tile = begin + index
            tl.store(tile_experts + tile, -1, mask=(tile >= all_used) & (tile < num_tiles))
    else:
        # A pair's row is the number of pairs with a smaller expert, or the same and a smaller number.
        mine = (block - 1) * PLACED + tl.arange(0, PLACED)
        my_id = tl.load(experts + mine, mask=mine < pairs, other=-1)
        before = tl.zeros([PLACED, COMPARED], tl.int32)
        for begin in tl.static_range(0, PAIRS, COMPARED):
            other = begin + tl.arange(0, COMPARED)
            other_ids = tl.load(experts + other, mask=other < pairs, other=-1)
            key = tl.where(other_ids >= 0, other_ids * PAIRS + other, 2**31 - 1)
            before += (key[None, :] < (my_id * PAIRS + mine)[:, None]).to(tl.int32)
        tl.store(order + tl.sum(before, axis=1), mine, mask=my_id >= 0)


class PairSorter:
    """Sorts the pairs of a layer's tokens by expert; those of an expert keep their order."""

    def __init__(self, num_experts: int, top_k: int, device: torch.device) -> None:
        """num_experts: this rank's."""
        self._num_experts = num_experts
        self._rows = torch.arange(top_k, dtype=torch.int32, device=device)
        self._ends = self._rows + 1
        self._used_tiles = torch.full((1,), top_k, dtype=torch.int32, device=device)
        self._claims = torch.zeros(2, dtype=torch.int32, device=device)

    def __call__(self, experts: torch.Tensor, tile_rows: int) -> SortedPairs:
        """experts: [tokens, top_k] int32, numbers of experts; -1 leaves the pair out. tile_rows: rows per tile."""
        if len(experts) == 1:  # the experts of a token differ, so each pair is a tile of its own
            rows = self._rows
            return SortedPairs(rows, experts[0], rows, self._ends, rows, self._used_tiles, self._claims)
        return _sort(experts, self._num_experts, tile_rows)


def _sort(experts: torch.Tensor, num_experts: int, tile_rows: int) -> SortedPairs:
    pairs = experts.numel()
    num_tiles = max_tiles(pairs, num_experts, tile_rows)
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    # All start at multiples of 16 bytes: kernels are compiled again for other alignments.
    of_tiles = torch.empty((4, num_tiles + -num_tiles % 4), dtype=torch.int32, device=experts.device)
    counters = torch.empty(6, dtype=torch.int32, device=experts.device)
    results = (order, *of_tiles[:, :num_tiles], counters[:1], counters[4:])
    blocks = max(-(-pairs // BLOCK), -(-num_tiles // TILES))
    bins = max(triton.next_power_of_2(num_experts), MIN_BINS)
    counts = None
    if 0 < pairs <= MAX_FEW:
        all_pairs = max(triton.next_power_of_2(pairs), MIN_BINS)
        _sort_few_kernel[(1 + -(-pairs // FEW_PLACED),)](
            *results,
            experts,
            pairs,
            num_tiles,
            TILE_ROWS=tile_rows,
            PAIRS=all_pairs,
            PLACED=FEW_PLACED,
            COMPARED=min(FEW_COMPARED, all_pairs),
            BLOCK_E=bins,
            num_warps=4,
            **dependent_launch(experts.device),
        )
        return SortedPairs(*results)
    if pairs > MAX_COUNTED:
        counts = torch.empty((blocks, bins), dtype=torch.int32, device=experts.device)
        _count_kernel[(blocks,)](
            counts, experts, pairs, BLOCK=BLOCK, BLOCK_E=bins, num_warps=4, **dependent_launch(experts.device)
        )
    if pairs:
        _sort_kernel[(blocks,)](
            *results,
            experts,
            experts if counts is None else counts,
            pairs,
            num_experts,
            num_tiles,
            -(-num_tiles // blocks),
            TILE_ROWS=tile_rows,
            COUNTS=counts is not None,
            BLOCK=BLOCK,
            BLOCK_E=bins,
            COUNTED=COUNTED,
            COMPARED=COMPARED,
            TILES=TILES,
            num_warps=4,
            **dependent_launch(experts.device),
        )
    return SortedPairs(*results)


def max_tiles(pairs: int, num_experts: int, tile_rows: int) -> int:
    """The largest number of tiles that any routing needs."""
    touched = min(pairs, num_experts)
    return touched + (pairs - touched) // tile_rows
