"""All-reduce over GPUs, residual addition and norm in one kernel, which reads the other GPUs' memory directly.

One program per row. Each rank writes its row where the others can read it, sets a flag in their memory, waits for their
flags, and sums all ranks' rows in float32 in the order of ranks: the results are the same on all ranks to the last bit.
A flag is the number of a call: `epochs` counts, for each row, the calls that had this row. A row has two buffers, used
in turn: a rank may still read one while another rank writes the other. By the time that one is written again, all ranks
have finished reading: the writer has seen their flags of the call in between, which they set after reading.

A program waits for the other ranks' programs of the same row. They are sure to run: there are never more rows than
programs that a GPU runs at the same time (`max_rows`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.common.launch import dependent_launch, release, wait


@frozen(kw_only=True, eq=False)
class ReduceBuffers:
    """Memory of all ranks in which rows of one size and dtype are reduced."""

    rank: int
    ranks: int
    size: int
    """Numbers per row."""
    max_rows: int
    rows: torch.Tensor
    """[ranks] int64: address of each rank's rows, [2, max_rows, size] of the rows' dtype."""
    flags: torch.Tensor
    """[ranks] int64: address of each rank's flags, [max_rows, ranks] int32, initially zero: the last call in which each
    rank has written its row."""
    epochs: torch.Tensor
    """[max_rows] int32, initially zero: calls of this rank that had the row."""


@triton.jit
def _all_reduce_norm_kernel(
    out,
    residual,
    x,
    weight,
    rows,
    flags,
    epochs,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    wait(PDL)
    release(PDL)
    epoch = tl.load(epochs + row) + 1
    offset = row.to(tl.int64) * SIZE + column
    shared = ((epoch & 1).to(tl.int64) * MAX_ROWS + row) * SIZE + column
    ours = tl.load(x + offset, mask=mask, other=0.0)
    tl.store(tl.multiple_of(tl.load(rows + RANK).to(x.dtype), 16) + shared, ours, mask=mask)
    tl.debug_barrier()  # all threads have written before one of them sets the flags
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            their_flag = tl.load(flags + peer).to(epochs.dtype) + row * RANKS + RANK
            tl.atomic_xchg(their_flag, epoch, sem="release", scope="sys")
    our_flags = tl.load(flags + RANK).to(epochs.dtype) + row * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            # A rank may be one call ahead. The difference is compared, so that the count may overflow.
            while (tl.atomic_add(our_flags + peer, 0, sem="acquire", scope="sys") - epoch) < 0:
                pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += ours.to(tl.float32)
        else:
            their_rows = tl.multiple_of(tl.load(rows + peer).to(x.dtype), 16)
            total += tl.load(their_rows + shared, mask=mask, other=0.0, volatile=True).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    # The norm is of the rounded sum that is stored, so that this layer and the next see the same residual.
    kept = total.to(residual.dtype.element_ty)
    tl.store(residual + offset, kept, mask=mask)
    total = kept.to(tl.float32)
    mean = tl.sum(total * total, axis=0) / SIZE
    normed = total * tl.rsqrt(mean + eps) * scale
    tl.store(out + offset, normed.to(out.dtype.element_ty), mask=mask)
    tl.store(epochs + row, epoch)


def all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, buffers: ReduceBuffers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce x over the ranks and add `residual`; returns the norm of that sum and the sum itself.

    x, residual: [..., size] of the buffers' dtype, at most `buffers.max_rows` rows, the same number on all ranks;
    weight: [size]. The sum overwrites `residual`; without one it is in new memory. It is rounded to x's dtype before it
    is normalized; all arithmetic is float32.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    size = buffers.size
    rows = x.numel() // size
    out = torch.empty_like(x)
    total = torch.empty_like(x) if residual is None else residual.contiguous()
    if rows:
        block = triton.next_power_of_2(size)
        _all_reduce_norm_kernel[(rows,)](
            out,
            total,
            x,
            weight,
            buffers.rows,
            buffers.flags,
            buffers.epochs,
            eps,
            RANK=buffers.rank,
            RANKS=buffers.ranks,
            MAX_ROWS=buffers.max_rows,
            SIZE=size,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(max(block // 512, 1), 8),
            **dependent_launch(x.device),
        )
    return out, total
