"""Sums over several programs of a grid that share the inputs of one tile, in an order that is always the same.

A program says first that it has its sums, and then, unless it is the last to do so, writes them. The last keeps its own
in registers and waits for the others', who run already and wait for nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

WRITTEN = tl.constexpr(2**16)
"""What a program adds to the arrivals of its tile once its sums are in memory; it added 1 when it had them."""


@triton.jit
def is_last(total, lane, partials, arrivals, SPLITS: tl.constexpr):
    """Leave this program's sums to the last of its tile, or be the last, and have all others'.

    total: [rows, columns] float32 or int32. lane: the numbers from 0 on in its shape. partials: the tile's, [SPLITS,
    rows, columns] in total's type, by the second number of programs. arrivals: the tile's counter, int32.
    """
    arrived = tl.atomic_add(arrivals, 1, sem="relaxed") % WRITTEN
    last = arrived == SPLITS - 1
    if last:
        state = tl.atomic_add(arrivals, 0, sem="acquire")
        while state < (SPLITS - 1) * WRITTEN:
            state = tl.atomic_add(arrivals, 0, sem="acquire")
    else:
        tl.store(partials + tl.program_id(1) * (total.shape[0] * total.shape[1]) + lane, total)
        tl.debug_barrier()  # all of this program's sums are written before it says so
        tl.atomic_add(arrivals, WRITTEN, sem="release")
    return last


@triton.jit
def add_others(total, lane, partials, arrivals, SPLITS: tl.constexpr):
    """The sum over the 2 or 4 programs of a tile, for the last: of pairs of neighbours, as a + b is b + a.

    All as in `is_last`. The counter is 0 again.
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
