"""x W^T for few rows of x and eight-bit codes of W, where reading W is all that counts.

W is [outputs, inputs] of float8 (e4m3) or int8 codes, dense. Its scales, float32, are one an output, [outputs], or
(BLOCKED) one for `scale_rows` outputs x 128 inputs, [ceil(outputs / scale_rows), ceil(inputs / 128)].

`vector`: a program holds a tile of W in registers, widens it and multiplies it by 1, 2 or 4 rows of x element by
element. `matrix`: tiles of W go through shared memory and registers to the tensor cores, W in the place of the matrix
with many rows and x^T in the other's. x is of a 16-bit type, and W's codes, which that type has all, are cast to it; or
(CODES) x is made of codes of W's type, with scales of its own, and they are multiplied as they are. Where W has few
rows, its columns may be shared out among programs, and the last one to finish adds up what all have left, in a fixed
order.

GATED: W has 2 * outputs rows, gate before up; the result is silu(gate) * up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.core.kernels.activation import silu
from engine.core.kernels.launch import prefetch, release, wait

GROUP = tl.constexpr(128)
"""Inputs that share a scale where W is BLOCKED."""
LANE = tl.constexpr(8)
"""Columns of W that a thread takes side by side: as many as 16-bit numbers of x make one access to memory."""


@triton.jit
def _fetch(rows, begin, ahead, TILE: tl.constexpr, THREADS: tl.constexpr):
    """Bring `ahead` bytes of each row of W, from column `begin` on, into the L2 cache; each thread asks for a piece."""
    PIECES: tl.constexpr = THREADS // TILE if TILE <= THREADS else 1
    piece = ahead // (PIECES * 16) * 16
    if piece > 0:
        start = begin + tl.arange(0, PIECES) * piece
        place = rows.to(tl.uint64)[:, None] + start.to(tl.uint64)[None, :]
        prefetch(place, tl.zeros([TILE, PIECES], tl.int32) + piece)


@triton.jit
def _row_of_x(x, m, rows, inputs, k):
    return tl.load(x + m * inputs + k, mask=(k < inputs) & (m < rows), other=0.0).to(tl.float32)


@triton.jit
def _partial(
    tile, values, scale, start, scale_columns, TILE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKED: tl.constexpr
):
    """tile: [TILE, BLOCK_K] codes, values: [BLOCK_K] -> products, summed in each thread: [TILE, BLOCK_K / LANE].

    scale: where the scales of the tile's rows begin, which all have the same.
    """
    if BLOCKED:
        group = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
        factor = tl.load(scale + group, mask=group < scale_columns, other=0.0)
        values = tl.reshape(tl.reshape(values, [BLOCK_K // GROUP, GROUP]) * factor[:, None], [BLOCK_K])
    products = tile.to(tl.float32) * values[None, :]
    return tl.sum(tl.reshape(products, [TILE, BLOCK_K // LANE, LANE]), axis=2)


@triton.jit
def _finish(sums, scale, bias, row, valid, BLOCKED: tl.constexpr, BIAS: tl.constexpr):
    """sums: [TILE, any] -> outputs of rows `row` of W: [TILE]."""
    total = tl.sum(sums, axis=1)
    if not BLOCKED:
        total *= tl.load(scale + row, mask=valid, other=0.0)
    if BIAS:
        total += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows", "ahead"])
def vector_kernel(
    out,
    x,
    weight,
    scale,
    bias,
    rows,
    outputs,
    inputs,
    scale_rows,
    scale_columns,
    ahead,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    THREADS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: [rows, inputs] with rows <= ROWS (1, 2 or 4); out: [rows, outputs]. If BLOCKED, TILE divides scale_rows."""
    release(PDL)
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = output < outputs
    row = tl.where(valid, output, 0)
    k = tl.max_contiguous(tl.arange(0, BLOCK_K), LANE)
    weight_row = weight + row.to(tl.int64) * inputs
    up_row = weight_row
    scale_row = scale
    scale_up = scale
    if GATED:
        up_row = weight + tl.where(valid, output + outputs, 0).to(tl.int64) * inputs
    if BLOCKED:
        first = tl.program_id(0) * TILE
        scale_row = scale + first // scale_rows * scale_columns
        scale_up = scale + (outputs + first) // scale_rows * scale_columns
    inside = valid[:, None] & (k < inputs)[None, :]
    tile = tl.load(weight_row[:, None] + k[None, :], mask=inside, other=0.0)
    up_tile = tile
    if GATED:
        up_tile = tl.load(up_row[:, None] + k[None, :], mask=inside, other=0.0)
    if PDL:
        most = tl.minimum(ahead, inputs - tl.minimum(inputs, BLOCK_K))
        _fetch(weight_row, BLOCK_K, most, TILE, THREADS)
        if GATED:
            _fetch(up_row, BLOCK_K, most, TILE, THREADS)
    wait(PDL)
    sum0 = tl.zeros([TILE, BLOCK_K // LANE], tl.float32)
    sum1 = sum0
    sum2 = sum0
    sum3 = sum0
    up0 = sum0
    up1 = sum0
    up2 = sum0
    up3 = sum0
    for start in range(0, inputs, BLOCK_K):
        after = start + BLOCK_K + k
        inside = valid[:, None] & (after < inputs)[None, :]
        following = tl.load(weight_row[:, None] + after[None, :], mask=inside, other=0.0)
        if GATED:
            up_following = tl.load(up_row[:, None] + after[None, :], mask=inside, other=0.0)
        x0 = _row_of_x(x, 0, rows, inputs, start + k)
        sum0 += _partial(tile, x0, scale_row, start, scale_columns, TILE, BLOCK_K, BLOCKED)
        if GATED:
            up0 += _partial(up_tile, x0, scale_up, start, scale_columns, TILE, BLOCK_K, BLOCKED)
        if ROWS > 1:
            x1 = _row_of_x(x, 1, rows, inputs, start + k)
            sum1 += _partial(tile, x1, scale_row, start, scale_columns, TILE, BLOCK_K, BLOCKED)
            if GATED:
                up1 += _partial(up_tile, x1, scale_up, start, scale_columns, TILE, BLOCK_K, BLOCKED)
        if ROWS > 2:
            x2 = _row_of_x(x, 2, rows, inputs, start + k)
            x3 = _row_of_x(x, 3, rows, inputs, start + k)
            sum2 += _partial(tile, x2, scale_row, start, scale_columns, TILE, BLOCK_K, BLOCKED)
            sum3 += _partial(tile, x3, scale_row, start, scale_columns, TILE, BLOCK_K, BLOCKED)
            if GATED:
                up2 += _partial(up_tile, x2, scale_up, start, scale_columns, TILE, BLOCK_K, BLOCKED)
                up3 += _partial(up_tile, x3, scale_up, start, scale_columns, TILE, BLOCK_K, BLOCKED)
        tile = following
        if GATED:
            up_tile = up_following
    _store_vector(out, sum0, up0, scale, bias, output, valid, 0, rows, outputs, GATED, BLOCKED, BIAS)
    if ROWS > 1:
        _store_vector(out, sum1, up1, scale, bias, output, valid, 1, rows, outputs, GATED, BLOCKED, BIAS)
    if ROWS > 2:
        _store_vector(out, sum2, up2, scale, bias, output, valid, 2, rows, outputs, GATED, BLOCKED, BIAS)
        _store_vector(out, sum3, up3, scale, bias, output, valid, 3, rows, outputs, GATED, BLOCKED, BIAS)


@triton.jit
def _store_vector(
    out,
    sums,
    up_sums,
    scale,
    bias,
    output,
    valid,
    m,
    rows,
    outputs,
    GATED: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIAS: tl.constexpr,
):
    total = _finish(sums, scale, bias, output, valid, BLOCKED, BIAS)
    if GATED:
        total = silu(total) * _finish(up_sums, scale, bias, outputs + output, valid, BLOCKED, BIAS)
    tl.store(out + m * outputs + output, total.to(out.dtype.element_ty), mask=valid & (m < rows))


@triton.jit
def _store_matrix(out, total, output, m, rows, outputs, TILE: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """total: [TILE, COLUMNS], the transpose of what is stored."""
    n = output
    if GATED:
        HALF: tl.constexpr = TILE // 2
        pair = tl.reshape(total, [2, HALF, COLUMNS])
        is_gate = (tl.arange(0, 2) == 0)[:, None, None]
        gate = tl.sum(tl.where(is_gate, pair, 0.0), axis=0)
        up = tl.sum(tl.where(is_gate, 0.0, pair), axis=0)
        n = tl.program_id(0) * HALF + tl.arange(0, HALF)
        total = silu(gate) * up
    place = m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(n < outputs)[:, None] & (m < rows)[None, :])


@triton.jit(do_not_specialize=["rows", "ahead"])
def matrix_kernel(
    out,
    x,
    weight,
    scale,
    x_scale,
    bias,
    partials,
    arrivals,
    rows,
    outputs,
    inputs,
    scale_rows,
    scale_columns,
    ahead,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    THREADS: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    BLOCKED: tl.constexpr,
    CODES: tl.constexpr,
    INTEGER: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, s, m) has a tile of W, split s of its columns, and COLUMNS rows of x. INTEGER: CODES are int8.

    x_scale (CODES): [rows], or if BLOCKED [rows, scale_columns], float32. If BLOCKED, BLOCK_K is GROUP.
    partials: [programs m, programs n, splits, TILE, COLUMNS] float32. arrivals: [programs m, programs n] int32, 0
    before and after.
    """
    release(PDL)
    lane = tl.arange(0, TILE)
    output = tl.program_id(0) * TILE + lane
    row = output
    if GATED:
        output = tl.program_id(0) * (TILE // 2) + lane % (TILE // 2)
        row = output + (lane // (TILE // 2)) * outputs
    valid = output < outputs
    row = tl.where(valid, row, 0)
    weight_row = weight + row.to(tl.int64) * inputs
    splits = tl.num_programs(1)
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), splits) * BLOCK_K
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, inputs)
    if PDL:
        _fetch(weight_row, begin, tl.minimum(ahead, tl.maximum(end - begin, 0)), TILE, THREADS)
    wait(PDL)
    m = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    present = m < rows
    x_row = x + tl.where(present, m, 0).to(tl.int64) * inputs
    total = tl.zeros([TILE, COLUMNS], tl.int32 if INTEGER else tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < end)[None, :]
        tile = tl.load(weight_row[:, None] + k[None, :], mask=valid[:, None] & inside, other=0.0)
        columns = tl.load(x_row[:, None] + k[None, :], mask=present[:, None] & inside, other=0.0)
        if INTEGER:
            total = tl.dot(tile, tl.trans(columns), total, out_dtype=tl.int32)
        elif BLOCKED:
            part = tl.dot(tile.to(columns.dtype), tl.trans(columns))
            group = start // GROUP
            part *= tl.load(scale + row // scale_rows * scale_columns + group)[:, None]
            if CODES:
                place = x_scale + m.to(tl.int64) * scale_columns + group
                part *= tl.load(place, mask=present, other=0.0)[None, :]
            total += part
        elif CODES:
            # The tensor cores add up float8 products with few digits; from block to block float32 does it.
            total += tl.dot(tile, tl.trans(columns))
        else:
            total = tl.dot(tile.to(columns.dtype), tl.trans(columns), total, input_precision="ieee")
    result = total.to(tl.float32)
    if not BLOCKED:
        result *= tl.load(scale + row, mask=valid, other=0.0)[:, None]
        if CODES:
            result *= tl.load(x_scale + m, mask=present, other=0.0)[None, :]
    added = tl.zeros([TILE], tl.float32)
    if BIAS:
        added = tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)
    if SPLIT:
        tile_id = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        numbers = lane[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        mine = partials + tile_id * splits * (TILE * COLUMNS) + numbers
        tl.store(mine + tl.program_id(1) * (TILE * COLUMNS), result)
        tl.debug_barrier()  # all of this program's sums are written before it says so
        arrived = tl.atomic_add(arrivals + tile_id, 1, sem="acq_rel")
        if arrived == splits - 1:
            result = tl.zeros([TILE, COLUMNS], tl.float32)
            for split in range(splits):
                result += tl.load(mine + split * (TILE * COLUMNS), cache_modifier=".cg")
            tl.store(arrivals + tile_id, 0)
            _store_matrix(out, result + added[:, None], output, m, rows, outputs, TILE, COLUMNS, GATED)
    else:
        _store_matrix(out, result + added[:, None], output, m, rows, outputs, TILE, COLUMNS, GATED)
