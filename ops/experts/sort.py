"""Sorts pairs of token and expert by expert, and divides each expert's into tiles of rows, without the host's help.

Numbers of tiles depend on the routing, which only the device knows. Grids have one program per tile of the worst case;
the tiles that are not used say so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.common.launch import dependent_launch, release, wait

BLOCK = 1024
COMPARED = 32
"""Pairs that are compared with all experts at a time."""
MAX_COMPACT = 2**19
"""Pairs times experts up to which each program counts the pairs of all experts, so that the used tiles come first and
there are no more than needed."""


@frozen(eq=False)
class SortedPairs:
    """Pairs in the order of their experts. A pair is number token * top_k + slot; pairs of other ranks are left out."""

    order: torch.Tensor
    """[pairs] int32: the pair in each row."""
    tile_experts: torch.Tensor
    """[tiles] int32: each tile's expert. -1: the tile is not used."""
    tile_begins: torch.Tensor
    """[tiles] int32: each tile's first row."""
    tile_ends: torch.Tensor
    """[tiles] int32: the end of its expert's rows."""


@triton.jit
def _sort_kernel(
    order,
    tile_experts,
    tile_begins,
    tile_ends,
    experts,
    pairs,
    num_experts,
    num_tiles,
    TILE_ROWS: tl.constexpr,
    COMPACT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    COMPARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Place one expert's pairs and tiles. Grid: (num_experts,).

    COMPACT: the tiles of expert e begin after those of all experts below; else at place first_row // TILE_ROWS + e,
    which leaves at most one tile unused per expert.
    """
    release(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    wait(PDL)
    if COMPACT:
        index = tl.arange(0, BLOCK_E)
        counts = tl.zeros([BLOCK_E], tl.int32)
        few = tl.arange(0, COMPARED)
        for begin in range(0, pairs, COMPARED):
            ids = tl.load(experts + begin + few, mask=begin + few < pairs, other=-1)
            counts += tl.sum((ids[None, :] == index[:, None]).to(tl.int32), axis=1)
        first = tl.sum(tl.where(index < expert, counts, 0), axis=0)
        count = tl.sum(tl.where(index == expert, counts, 0), axis=0)
        place = tl.sum(tl.where(index < expert, (counts + TILE_ROWS - 1) // TILE_ROWS, 0), axis=0)
        end = place + (count + TILE_ROWS - 1) // TILE_ROWS
    else:
        below = tl.zeros([BLOCK], tl.int32)
        mine = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, pairs, BLOCK):
            ids = tl.load(experts + begin + lane, mask=begin + lane < pairs, other=-1)
            below += ((ids >= 0) & (ids < expert)).to(tl.int32)
            mine += (ids == expert).to(tl.int32)
        first = tl.sum(below, axis=0)
        count = tl.sum(mine, axis=0)
        place = first // TILE_ROWS + expert
        end = (first + count) // TILE_ROWS + expert + 1
    if expert == num_experts - 1:
        end = num_tiles
    used = (count + TILE_ROWS - 1) // TILE_ROWS
    for begin in range(place, end, BLOCK):
        tile = begin + lane
        here = tile < end
        tl.store(tile_experts + tile, tl.where(tile - place < used, expert, -1), mask=here)
        tl.store(tile_begins + tile, first + (tile - place) * TILE_ROWS, mask=here)
        tl.store(tile_ends + tile, tl.zeros([BLOCK], tl.int32) + first + count, mask=here)
    if count > 0:
        for begin in range(0, pairs, BLOCK):
            ids = tl.load(experts + begin + lane, mask=begin + lane < pairs, other=-1)
            mine_here = (ids == expert).to(tl.int32)
            rank = tl.cumsum(mine_here, axis=0) - mine_here
            tl.store(order + first + rank, begin + lane, mask=ids == expert)
            first += tl.sum(mine_here, axis=0)


class PairSorter:
    """Sorts the pairs of a layer's tokens by expert; those of an expert keep their order."""

    def __init__(self, num_experts: int, top_k: int, device: torch.device) -> None:
        """num_experts: this rank's."""
        self._num_experts = num_experts
        self._rows = torch.arange(top_k, dtype=torch.int32, device=device)
        self._ends = self._rows + 1

    def __call__(self, experts: torch.Tensor, tile_rows: int) -> SortedPairs:
        """experts: [tokens, top_k] int32, numbers of experts, or -1 for a pair to leave out. tile_rows: of a tile."""
        if len(experts) == 1:  # the experts of a token differ, so each pair is a tile of its own
            return SortedPairs(self._rows, experts[0], self._rows, self._ends)
        return _sort(experts, self._num_experts, tile_rows)


def _sort(experts: torch.Tensor, num_experts: int, tile_rows: int) -> SortedPairs:
    pairs = experts.numel()
    compact = pairs * num_experts <= MAX_COMPACT
    num_tiles = max_tiles(pairs, num_experts, tile_rows, compact=compact)
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    tile_experts, tile_begins, tile_ends = (
        torch.empty(num_tiles, dtype=torch.int32, device=experts.device) for _ in range(3)
    )
    if pairs:
        _sort_kernel[(num_experts,)](
            order,
            tile_experts,
            tile_begins,
            tile_ends,
            experts,
            pairs,
            num_experts,
            num_tiles,
            TILE_ROWS=tile_rows,
            COMPACT=compact,
            BLOCK=BLOCK,
            BLOCK_E=triton.next_power_of_2(num_experts),
            COMPARED=COMPARED,
            num_warps=4,
            **dependent_launch(experts.device),
        )
    return SortedPairs(order, tile_experts, tile_begins, tile_ends)


def max_tiles(pairs: int, num_experts: int, tile_rows: int, *, compact: bool) -> int:
    """The largest number of tiles that any routing needs; not compact: with those that may be left unused."""
    if not compact:
        return pairs // tile_rows + num_experts
    touched = min(pairs, num_experts)
    return touched + (pairs - touched) // tile_rows
