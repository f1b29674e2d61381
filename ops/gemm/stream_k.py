"""Stream-K: how persistent programs share tiles so that all finish at the same time.

A unit is one loop iteration of one tile; units are numbered tile by tile. The tiles that fill whole waves of programs
are computed one per program and wave. The units of the remaining tiles, the first ones, are divided into contiguous
ranges of equal length, one per program. Of a tile that several programs share, the program with the first units adds
the sums of the programs after it, in the order of their numbers, so that results do not depend on timing. A program
computes its range first, from its first unit on: the sums that it waits for were mostly written long before. All
programs must run concurrently. Source: Osama et al., "Stream-K", 2023 (arXiv:2301.03598).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def shared_units_of(tiles, units_per_tile):
    """The number of units that are divided into ranges."""
    return tiles % gl.num_programs(0) * units_per_tile


@gluon.jit
def begin_of(program, shared_units):
    """The first unit of a program's range, which ends where the next program's begins.

    With fewer units than programs, the first programs have one each: no program waits for one that has none.
    """
    sharing = gl.maximum(gl.minimum(gl.num_programs(0), shared_units), 1)
    return gl.minimum(program, sharing) * shared_units // sharing


@gluon.jit
def _first_whole(shared_units, units_per_tile):
    """The first unit of this program's first tile that is not shared."""
    return shared_units + gl.program_id(0) * units_per_tile


@gluon.jit
def first_unit(shared_units, units_per_tile):
    """The first unit that this program computes; not less than the number of units where there is none."""
    begin = begin_of(gl.program_id(0), shared_units)
    end = begin_of(gl.program_id(0) + 1, shared_units)
    return gl.where(begin < end, begin, _first_whole(shared_units, units_per_tile))


@gluon.jit
def unit_after(unit, shared_units, units_per_tile):
    """The unit that this program computes after `unit`."""
    unit += 1
    is_next_tile = (unit > shared_units) & (unit % units_per_tile == 0)
    other_tiles = gl.where(is_next_tile, (gl.num_programs(0) - 1) * units_per_tile, 0)
    is_end_of_range = unit == begin_of(gl.program_id(0) + 1, shared_units)
    return gl.where(is_end_of_range, _first_whole(shared_units, units_per_tile), unit + other_tiles)


SUMS_PER_LINE = gl.constexpr(128)
"""Sums that a warp reads or writes side by side, 4 per thread."""


@gluon.jit
def by_thread(total):
    """Sums of wgmma, [rows, columns], with 4 of a thread side by side: [rows * columns / 128, 128]."""
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    parts = total.reshape((ROWS // 16, 2, 8, COLUMNS // 8, 4, 2)).permute((0, 3, 2, 4, 1, 5))
    return parts.reshape((ROWS * COLUMNS // SUMS_PER_LINE, SUMS_PER_LINE))


@gluon.jit
def to_rows(sums, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The inverse of `by_thread`, in another layout. A thread's sums are of 2 columns in rows that are 8 apart."""
    parts = sums.reshape((ROWS // 16, COLUMNS // 8, 8, 4, 2, 2)).permute((0, 4, 2, 1, 3, 5))
    return parts.reshape((ROWS, COLUMNS))


@gluon.jit
def offsets(sums):
    """0, 1, ... in the shape and layout of `sums`."""
    LAYOUT: gl.constexpr = sums.type.layout
    row = gl.arange(0, sums.shape[0], gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(row, 1) * sums.shape[1] + gl.expand_dims(column, 0)


@gluon.constexpr_function
def _sums_before(totals, part):
    """Number of sums in the parts of a tile before this one."""
    return sum(total.shape[0] * total.shape[1] for total in totals[:part])


@gluon.jit
def write_partial(totals, partials, arrivals):
    """Write this program's sums of a tile that another program began.

    totals: the parts of the tile, each [rows, columns] float32 or int32. partials: [programs, sums of all parts], of
    the same type. arrivals: [programs] int32, 1 where sums are written and not yet read.
    """
    mine = partials + gl.program_id(0) * _sums_before(totals, len(totals))
    for part in gl.static_range(len(totals)):
        sums = by_thread(totals[part])
        gl.store(mine + _sums_before(totals, part) + offsets(sums), sums)
    tl.debug_barrier()  # all threads' sums are written before the counter changes
    gl.atomic_add(arrivals + gl.program_id(0), 1, sem="release")


@gluon.jit
def _sum_of(total, partial):
    """Sums of wgmma plus those at a place in memory."""
    sums = by_thread(total)
    sums += gl.load(partial + offsets(sums), cache_modifier=".cg")
    return gl.convert_layout(to_rows(sums, total.shape[0], total.shape[1]), total.type.layout)


@gluon.jit
def _added(totals, partials, other):
    """The sums of each part plus those of another program."""
    theirs = partials + other * _sums_before(totals, len(totals))
    found = (_sum_of(totals[0], theirs),)
    for part in gl.static_range(1, len(totals)):
        # Triton knows no *several.
        found = found + (_sum_of(totals[part], theirs + _sums_before(totals, part)),)  # noqa: RUF005
    return found


@gluon.jit
def add_partials(totals, partials, arrivals, tile_end, shared_units):
    """Add the sums of the programs whose ranges follow, up to the tile's end. Other arguments as in `write_partial`."""
    other = gl.program_id(0) + 1
    while begin_of(other, shared_units) < tile_end:
        while gl.atomic_add(arrivals + other, 0, sem="acquire") == 0:
            pass
        totals = _added(totals, partials, other)
        gl.store(arrivals + other, 0)
        other += 1
    return totals
