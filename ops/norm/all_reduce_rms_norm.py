"""Sums of rows over GPUs, residual addition and norm in one kernel, which reads the other GPUs' memory itself.

Each rank writes a row where the others can read it, tells them, waits until they have told it, and adds up all of them
in float32, in the order of ranks: the results are the same on all to the last bit. There is one program a row. Programs
of one row meet in every call that has this row, and count these calls in `epochs`. A row has two places, used in turn:
a rank may still be reading one of them while another writes to the other, but not longer, since it must have ended that
call before it takes part in the next.

What one rank's program waits for is the other ranks' programs of the same row. They come to run: no more rows are taken
than a GPU has room for at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.common.launch import dependent_launch, release, wait


@frozen(kw_only=True, eq=False)
class RowSums:
    """Memory for sums of rows of one size and type, of all ranks."""

    rank: int
    ranks: int
    size: int
    """Numbers in a row."""
    most_rows: int
    places: torch.Tensor
    """[ranks] int64: addresses of each rank's rows, [2, most_rows, size] of the rows' type."""
    flags: torch.Tensor
    """[ranks] int64: addresses of each rank's flags, [most_rows, ranks] int32, zeros at first: the calls told of."""
    epochs: torch.Tensor
    """[most_rows] int32, zeros at first: calls that this rank has taken part in."""


@triton.jit
def _sum_norm_kernel(
    out,
    residual,
    x,
    weight,
    places,
    flags,
    epochs,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
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
    at = row.to(tl.int64) * SIZE + column
    shared = ((epoch & 1).to(tl.int64) * MOST_ROWS + row) * SIZE + column
    ours = tl.load(x + at, mask=mask, other=0.0)
    tl.store(tl.multiple_of(tl.load(places + RANK).to(x.dtype), 16) + shared, ours, mask=mask)
    tl.debug_barrier()  # all threads have written before one of them tells
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = tl.load(flags + peer).to(epochs.dtype) + row * RANKS + RANK
            tl.atomic_xchg(theirs, epoch, sem="release", scope="sys")
    told = tl.load(flags + RANK).to(epochs.dtype) + row * RANKS
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            # A rank may be one call ahead; by differences, so that the count may overflow.
            while (tl.atomic_add(told + peer, 0, sem="acquire", scope="sys") - epoch) < 0:
                pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += ours.to(tl.float32)
        else:
            rows = tl.multiple_of(tl.load(places + peer).to(x.dtype), 16)
            total += tl.load(rows + shared, mask=mask, other=0.0, volatile=True).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    # What is normalised is what is kept, so that a row means the same to this layer and to the next.
    kept = total.to(residual.dtype.element_ty)
    tl.store(residual + at, kept, mask=mask)
    total = kept.to(tl.float32)
    mean = tl.sum(total * total, axis=0) / SIZE
    normed = total * tl.rsqrt(mean + eps) * scale
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)
    tl.store(epochs + row, epoch)


def sum_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, sums: RowSums
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all ranks' x summed + residual, and that sum, which overwrites `residual` (without one: new memory).

    x, residual: [..., size], of at most `sums.most_rows` rows, as many on all ranks, of the type that `sums` is for;
    weight: [size]. The sum is rounded to that type before it is normalised; all arithmetic is float32.
    """
    if not x.is_contiguous():
        x = x.contiguous()
    size = sums.size
    rows = x.numel() // size
    out = torch.empty_like(x)
    total = torch.empty_like(x) if residual is None else residual.contiguous()
    if rows:
        block = triton.next_power_of_2(size)
        _sum_norm_kernel[(rows,)](
            out,
            total,
            x,
            weight,
            sums.places,
            sums.flags,
            sums.epochs,
            eps,
            RANK=sums.rank,
            RANKS=sums.ranks,
            MOST_ROWS=sums.most_rows,
            SIZE=size,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            num_warps=min(max(block // 512, 1), 8),
            **dependent_launch(x.device),
        )
    return out, total
