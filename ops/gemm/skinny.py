"""Skinny GEMM: x W^T for few rows of x, where the time is that of reading W.

Two kernels. `vector_kernel`, for up to 4 rows: a program holds a tile of W in registers, multiplies it element by
element by 1, 2 or 4 rows of x and sums over the tile's columns at the end. The other one uses tensor cores
(ops/gemm/skinny_matrix.py).

Under programmatic dependent launch both load weights before they wait for the kernel that writes x: `vector_kernel`
loads its first tile, and both may prefetch more into the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.activation.act_and_mul import activate
from engine.ops.common.launch import prefetch, release, wait
from engine.ops.sampling.argmax import max_and_index

PLAIN = tl.constexpr(0)
"""out: [rows, outputs]."""
ARGMAX = tl.constexpr(1)
"""out: [rows, programs] float32, the largest output of each program, rounded to W's dtype as PLAIN stores it; tokens:
[rows, programs] int32, its index, the first of equals."""
GATED = tl.constexpr(2)
"""GATED + ACTIVATION (act_and_mul): W has 2 * outputs rows, gate before up; a tile has both rows of an output. out:
[rows, outputs], act(gate) * up."""


@triton.jit
def place_of(lane, TILE: tl.constexpr, outputs, EPILOGUE: tl.constexpr):
    """For rows of a tile, by number: the output that each belongs to, and its row in W."""
    if EPILOGUE >= GATED:
        output = tl.program_id(0) * (TILE // 2) + lane % (TILE // 2)
        row = output + (lane // (TILE // 2)) * outputs
    else:
        output = tl.program_id(0) * TILE + lane
        row = output
    return output, row


@triton.jit
def rows_of(TILE: tl.constexpr, outputs, EPILOGUE: tl.constexpr):
    """`place_of` of all rows of a tile."""
    return place_of(tl.arange(0, TILE), TILE, outputs, EPILOGUE)


@triton.jit
def prefetch_rows(rows, begin, end, ahead, TILE: tl.constexpr, THREADS: tl.constexpr):
    """Prefetch `ahead` bytes of each row of W into the L2 cache, from column `begin` on but not beyond `end`."""
    # Each thread prefetches one piece.
    PIECES: tl.constexpr = THREADS // TILE if TILE <= THREADS else 1
    SIZE: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    piece = tl.minimum(ahead, (end - begin) * SIZE) // (PIECES * 16) * 16
    if piece > 0:
        start = begin * SIZE + tl.arange(0, PIECES) * piece
        place = rows.to(tl.uint64)[:, None] + start.to(tl.uint64)[None, :]
        prefetch(place, tl.zeros([TILE, PIECES], tl.int32) + piece)


@triton.jit
def store_max(out, tokens, total, output, valid, m, rows, DTYPE: tl.constexpr):
    """Store the largest output of each row m of x, rounded to DTYPE, and its index.

    total: the sums of a tile, [tile] of one row or [tile, rows]; output: their numbers, valid: whether there is such an
    output, both with as many dimensions.
    """
    rounded = total.to(DTYPE).to(tl.float32)
    peak, first = max_and_index(tl.where(valid, rounded, float("-inf")), output, 0)
    place = m * tl.num_programs(0) + tl.program_id(0)
    tl.store(out + place, peak, mask=m < rows)
    tl.store(tokens + place, first, mask=m < rows)


@triton.jit
def store_vector(out, tokens, total, bias, output, row, m, rows, outputs, EPILOGUE: tl.constexpr, BIAS: tl.constexpr):
    """Apply the epilogue to row m of the result and store it. total: [tile], the sums of row m of x; bias: a pointer to
    numbers of W's dtype, read only with BIAS."""
    valid = output < outputs
    if BIAS:
        total += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)
    if EPILOGUE == PLAIN:
        tl.store(out + m * outputs + output, total.to(out.dtype.element_ty), mask=valid & (m < rows))
    elif EPILOGUE >= GATED:
        HALF: tl.constexpr = total.shape[0] // 2
        pair = tl.reshape(total, [2, HALF])
        is_gate = (tl.arange(0, 2) == 0)[:, None]
        gate = tl.sum(tl.where(is_gate, pair, 0.0), axis=0)
        up = tl.sum(tl.where(is_gate, 0.0, pair), axis=0)
        n = tl.program_id(0) * HALF + tl.arange(0, HALF)
        value = activate(gate, up, EPILOGUE - GATED).to(out.dtype.element_ty)
        tl.store(out + m * outputs + n, value, mask=(n < outputs) & (m < rows))
    else:
        store_max(out, tokens, total, output, valid, m, rows, bias.dtype.element_ty)


@triton.jit(do_not_specialize=["rows", "ahead"])
def vector_kernel(
    out,
    tokens,
    x,
    weight,
    bias,
    rows,
    outputs,
    inputs,
    ahead,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    THREADS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    LATE_RELEASE: tl.constexpr,
    PDL: tl.constexpr,
):
    """x W^T with the EPILOGUE. Grid: (tiles of W,).

    x: [rows, inputs], rows <= ROWS (1, 2 or 4); weight: [outputs (twice if gated), inputs]; both contiguous. ahead:
    bytes of each row to prefetch. LATE_RELEASE: W is large, so the next kernel is released at the end.
    """
    if not LATE_RELEASE:
        release(PDL)
    output, row = rows_of(TILE, outputs, EPILOGUE)
    valid = (output < outputs)[:, None]
    k = tl.arange(0, BLOCK_K)
    weight_row = weight + tl.where(output < outputs, row, 0).to(tl.int64) * inputs
    tile = tl.load(weight_row[:, None] + k[None, :], mask=valid & (k < inputs)[None, :], other=0.0)
    if PDL:
        prefetch_rows(weight_row, BLOCK_K, inputs, ahead, TILE, THREADS)
    wait(PDL)
    sum0 = tl.zeros([TILE, BLOCK_K], tl.float32)
    if ROWS > 1:
        sum1 = tl.zeros([TILE, BLOCK_K], tl.float32)
    if ROWS > 2:
        sum2 = tl.zeros([TILE, BLOCK_K], tl.float32)
        sum3 = tl.zeros([TILE, BLOCK_K], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        after = start + BLOCK_K + k
        following = tl.load(weight_row[:, None] + after[None, :], mask=valid & (after < inputs)[None, :], other=0.0)
        wide = tile.to(tl.float32)
        inside = start + k < inputs
        here = x + start + k
        sum0 += wide * tl.load(here, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ROWS > 1:
            sum1 += wide * tl.load(here + inputs, mask=inside & (rows > 1), other=0.0).to(tl.float32)[None, :]
        if ROWS > 2:
            sum2 += wide * tl.load(here + 2 * inputs, mask=inside & (rows > 2), other=0.0).to(tl.float32)[None, :]
            sum3 += wide * tl.load(here + 3 * inputs, mask=inside & (rows > 3), other=0.0).to(tl.float32)[None, :]
        tile = following
    if LATE_RELEASE:
        release(PDL)  # see ops/common/launch.py
    store_vector(out, tokens, tl.sum(sum0, axis=1), bias, output, row, 0, rows, outputs, EPILOGUE, BIAS)
    if ROWS > 1:
        store_vector(out, tokens, tl.sum(sum1, axis=1), bias, output, row, 1, rows, outputs, EPILOGUE, BIAS)
    if ROWS > 2:
        store_vector(out, tokens, tl.sum(sum2, axis=1), bias, output, row, 2, rows, outputs, EPILOGUE, BIAS)
        store_vector(out, tokens, tl.sum(sum3, axis=1), bias, output, row, 3, rows, outputs, EPILOGUE, BIAS)
