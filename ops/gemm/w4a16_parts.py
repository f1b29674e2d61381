"""Parts of a W4A16 tile in Gluon: tuples with a value per part of PART rows of W, or of the rows of x.

Triton knows no *several, so tuples grow by addition.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from engine.ops.gemm.persistent_w4a16 import load_entries, row_of_lane

PART = gl.constexpr(128)
"""Rows of W that all warps multiply at a time."""


@gluon.jit
def rows_of_parts(begin_n, lane, weight_rows, PARTS: gl.constexpr, EPILOGUE: gl.constexpr):
    """The rows of W."""
    rows = (row_of_lane(begin_n, lane, weight_rows, EPILOGUE),)
    for part in gl.static_range(1, PARTS):
        more = row_of_lane(begin_n + part * PART, lane, weight_rows, EPILOGUE)
        rows = rows + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def entries_of_parts(scales, block, rows, weight_rows, ENTRIES: gl.constexpr):
    """The entries of a block's scales."""
    entries = (load_entries(scales, block, rows[0], weight_rows, ENTRIES),)
    for part in gl.static_range(1, len(rows)):
        more = load_entries(scales, block, rows[part], weight_rows, ENTRIES)
        entries = entries + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return entries


@gluon.jit
def words_of_parts(word_stages, slot, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The words in a slot."""
    words = (word_stages.index(slot * PARTS).load(LAYOUT),)
    for part in gl.static_range(1, PARTS):
        more = word_stages.index(slot * PARTS + part).load(LAYOUT)
        words = words + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return words


@gluon.jit
def zeros_of_parts(PARTS: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums before the first product."""
    totals = (gl.zeros((PART, BLOCK_M), gl.float32, LAYOUT),)
    for _ in gl.static_range(1, PARTS):
        more = gl.zeros((PART, BLOCK_M), gl.float32, LAYOUT)
        totals = totals + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return totals


@gluon.jit
def multiplied(weight, right, totals, NUMBER: gl.constexpr):
    """The sums, to those of part NUMBER a product added. Does not wait for the product."""
    total = warpgroup_mma(weight, right, totals[NUMBER], is_async=True)
    if len(totals) == 1:
        found = (total,)
    elif NUMBER == 0:
        found = (total, totals[1])  # type: ignore[assignment]
    else:
        found = (totals[0], total)  # type: ignore[assignment]
    return found


@gluon.jit
def settled(totals, PENDING: gl.constexpr, GROUPS: gl.constexpr = 1):
    """The sums, when all products but the last PENDING are complete. GROUPS: groups of wgmma per product."""
    if len(totals) == 1:
        found = (warpgroup_mma_wait(PENDING, deps=[totals[0]]),)
    else:
        found = warpgroup_mma_wait(PENDING * GROUPS, deps=[totals[0], totals[1]])
    return found
