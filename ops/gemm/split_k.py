"""Deterministic split-K reduction: the programs that divide the inputs of one tile add up their partial sums.

Each program announces its arrival with an atomic counter, and all but the last to arrive write their sums to memory.
The last keeps its own sums in registers and spins until the others are written; as those programs are already running
and wait for nothing, the wait ends. Sums are added in a fixed order, so results do not depend on the order of arrival.
"""

from __future__ import annotations

import triton
import triton.language as tl

WRITTEN = tl.constexpr(2**16)
"""Added to a tile's counter once a program's sums are in memory. On arrival the program added 1."""


@triton.jit
def is_last(total, lane, partials, arrivals, SPLITS: tl.constexpr):
    """Whether this program is the last of its tile to arrive; all others' sums are then in `partials`.

    If not, writes this program's sums. total: [rows, columns] float32 or int32. lane: the offsets 0, 1, ... in total's
    shape. partials: the tile's, [SPLITS, rows, columns] in total's dtype, indexed by program_id(1). arrivals: the
    tile's counter, int32.
    """
    arrived = tl.atomic_add(arrivals, 1, sem="relaxed") % WRITTEN
    last = arrived == SPLITS - 1
    if last:
        state = tl.atomic_add(arrivals, 0, sem="acquire")
        while state < (SPLITS - 1) * WRITTEN:
            state = tl.atomic_add(arrivals, 0, sem="acquire")
    else:
        tl.store(partials + tl.program_id(1) * (total.shape[0] * total.shape[1]) + lane, total)
        tl.debug_barrier()  # all threads' sums are written before the counter changes
        tl.atomic_add(arrivals, WRITTEN, sem="release")
    return last


@triton.jit
def add_others(total, lane, partials, arrivals, SPLITS: tl.constexpr):
    """The sum over the 2 or 4 programs of a tile, computed by the last. Resets the counter to 0.

    Neighbours are added first, then the pairs: as a + b = b + a, the result does not depend on which program is last.
    Arguments as in `is_last`.
    """
    SIZE: tl.constexpr = total.shape[0] * total.shape[1]
    split = tl.program_id(1)
    total += tl.load(partials + (split ^ 1) * SIZE + lane, cache_modifier=".cg")
    if SPLITS == 4:
        pair = tl.load(partials + (split ^ 2) * SIZE + lane, cache_modifier=".cg")
        pair += tl.load(partials + (split ^ 3) * SIZE + lane, cache_modifier=".cg")
        total += pair
    tl.store(arrivals, 0)
    return total
