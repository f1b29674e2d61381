"""Skinny GEMM by tensor cores: x W^T for up to 128 rows of x, where the time is that of reading W.

Tensor cores compute W x^T. x^T is padded to a power of two of columns, at least 16; tiles of W and of x^T go through
shared memory. Where W has few rows its columns may be divided among programs (split-K).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.common.launch import release, wait
from engine.ops.gemm.skinny import ARGMAX, prefetch_rows, store_max
from engine.ops.gemm.weight_tile import INTERLEAVE, reduce_and_store, rows_of_tile


@triton.jit(do_not_specialize=["rows", "ahead"])
def matrix_kernel(
    out,
    tokens,
    x,
    weight,
    bias,
    partials,
    arrivals,
    polled_sums,
    rows,
    outputs,
    inputs,
    ahead,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    THREADS: tl.constexpr,
    SPLIT: tl.constexpr,
    POLLED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    LATE_RELEASE: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """x W^T with the EPILOGUE of ops/gemm/skinny.py. Grid: (tiles of W, splits).

    x: [rows, inputs], rows <= COLUMNS; weight: [outputs (twice if gated), inputs]; both contiguous. ahead: bytes of
    each row to prefetch. LATE_RELEASE: W is large, so the next kernel is released at the end. partials, arrivals,
    polled_sums, SPLIT, POLLED, ASM: as of `reduce_and_store`; SPLIT is not for ARGMAX.
    """
    if not LATE_RELEASE:
        release(PDL)
    output, row = rows_of_tile(TILE, INTERLEAVE, outputs, EPILOGUE)
    weight_row = weight + row.to(tl.int64) * inputs
    splits = tl.num_programs(1)
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_K), splits) * BLOCK_K
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, inputs)
    if PDL:
        prefetch_rows(weight_row, begin, end, ahead, TILE, THREADS)
    wait(PDL)
    m = tl.arange(0, COLUMNS)
    x_row = (x + m * inputs)[:, None]
    present = (m < rows)[:, None]
    valid = (output < outputs)[:, None]
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < end)[None, :]
        tile = tl.load(weight_row[:, None] + k[None, :], mask=valid & inside, other=0.0)
        columns = tl.load(x_row + k[None, :], mask=present & inside, other=0.0)
        total = tl.dot(tile, tl.trans(columns), total, input_precision="ieee")
    if LATE_RELEASE:
        release(PDL)  # see ops/common/launch.py
    if EPILOGUE == ARGMAX:
        store_max(out, tokens, total, output[:, None], valid, m, rows, bias.dtype.element_ty)
    else:
        tile_number = tl.program_id(0)
        reduce_and_store(
            out,
            total,
            bias,
            partials,
            arrivals,
            polled_sums,
            tile_number,
            0,
            rows,
            outputs,
            SPLIT,
            POLLED,
            EPILOGUE,
            BIAS,
            ASM,
        )
