"""What kernels that compute W x^T by tensor cores have in common: the rows of W in a tile, and how sums become outputs.

Rows of a tile are rows of W, columns of a tile are rows of x. The inputs of a tile may be divided among programs
(split-K, program_id(1)).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.activation.act_and_mul import activate
from engine.ops.gemm.skinny import GATED
from engine.ops.gemm.split_k_polling import poll_sums, write_sums

INTERLEAVE = tl.constexpr(8)
"""Rows of the gate and of the up projection alternate in runs of this length in a gated tile: a thread that holds one
element of an mma result also holds the element this many rows further on, so that gate and up meet in one thread."""


@triton.jit
def rows_of_tile(TILE: tl.constexpr, RUN: tl.constexpr, outputs, EPILOGUE: tl.constexpr):
    """For each row of a tile: the output it belongs to, and its row in W. Gated: runs of RUN gate and up rows
    alternate."""
    lane = tl.arange(0, TILE)
    if EPILOGUE >= GATED:
        output = tl.program_id(0) * (TILE // 2) + lane // (2 * RUN) * RUN + lane % RUN
        row = output + lane // RUN % 2 * outputs
    else:
        output = tl.program_id(0) * TILE + lane
        row = output
    return output, tl.where(output < outputs, row, 0)  # rows beyond the last compute row 0 and are not stored


@triton.jit
def _store(out, total, bias, first, rows, outputs, RUN: tl.constexpr, EPILOGUE: tl.constexpr, BIAS: tl.constexpr):
    """Apply bias and epilogue and store. total: [TILE, COLUMNS] float32, of the rows of x from `first` on; its rows in
    the order of `rows_of_tile`."""
    COLUMNS: tl.constexpr = total.shape[1]
    output, row = rows_of_tile(total.shape[0], RUN, outputs, EPILOGUE)
    m = first + tl.arange(0, COLUMNS)
    if BIAS:
        total += tl.load(bias + row, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    if EPILOGUE >= GATED:
        HALF: tl.constexpr = total.shape[0] // 2
        pair = tl.reshape(total, [HALF // RUN, 2, RUN, COLUMNS])
        is_gate = (tl.arange(0, 2) == 0)[None, :, None, None]
        gate = tl.sum(tl.where(is_gate, pair, 0.0), axis=1)
        up = tl.sum(tl.where(is_gate, 0.0, pair), axis=1)
        n = tl.program_id(0) * HALF + tl.arange(0, HALF)
        value = tl.reshape(activate(gate, up, EPILOGUE - GATED), [HALF, COLUMNS])
    else:
        n = output
        value = total
    mask = (n < outputs)[:, None] & (m < rows)[None, :]
    place = m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def reduce_and_store(
    out,
    total,
    bias,
    partials,
    arrivals,
    polled_sums,
    tile,
    first,
    rows,
    outputs,
    SPLIT: tl.constexpr,
    POLLED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BIAS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add up the sums of the programs that divide a tile's inputs, apply bias and epilogue, and store.

    out: [rows, outputs]. total: [TILE, COLUMNS] float32, its rows in the order of `rows_of_tile` with runs of
    INTERLEAVE. tile: the tile's number; first: its first row of x. SPLIT: whether inputs are divided; partials: [tiles,
    splits, TILE, COLUMNS] float32; arrivals: [tiles] int32, 0 before and after. POLLED: if not 0, sums are added by
    polling instead (split_k_polling.py); polled_sums: [tiles, splits - 1, TILE, COLUMNS] int32. ASM: PTX may be used.
    """
    TILE: tl.constexpr = total.shape[0]
    COLUMNS: tl.constexpr = total.shape[1]
    splits = tl.num_programs(1)
    if POLLED:
        buffer = polled_sums + tile * (splits - 1) * (TILE * COLUMNS)
        if tl.program_id(1) < splits - 1:
            write_sums(total, buffer)
        else:
            total += poll_sums(buffer, splits - 1, total.shape, POLLED, ASM)
            _store(out, total, bias, first, rows, outputs, INTERLEAVE, EPILOGUE, BIAS)
    elif SPLIT:
        HALF: tl.constexpr = TILE // 2
        lane = tl.arange(0, TILE)
        place = lane
        if EPILOGUE >= GATED:  # gate rows before up rows, so that the reading thread has both
            place = lane // (2 * INTERLEAVE) * INTERLEAVE + lane % INTERLEAVE + lane // INTERLEAVE % 2 * HALF
        ours = partials + tile * splits * (TILE * COLUMNS) + tl.arange(0, COLUMNS)[None, :]
        tl.store(ours + (tl.program_id(1) * TILE + place)[:, None] * COLUMNS, total)
        tl.debug_barrier()  # all threads' sums are written before the counter changes
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        if arrived == splits - 1:
            total = tl.zeros_like(total)
            for split in range(splits):
                total += tl.load(ours + (lane + split * TILE)[:, None] * COLUMNS, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
            _store(out, total, bias, first, rows, outputs, HALF, EPILOGUE, BIAS)
    else:
        _store(out, total, bias, first, rows, outputs, INTERLEAVE, EPILOGUE, BIAS)
