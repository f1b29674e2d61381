"""Sums the weighted results of each token's experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait

BLOCK = 1024


@triton.jit
def _combine_kernel(out, results, experts, weights, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = the sum of a token's results times their weights. Grid: (tokens, blocks of a row)."""
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The routing may be read before `wait`: the kernels of the experts have waited for it (see ops/common/launch.py).
    experts += token * TOP_K
    weights += token * TOP_K
    chosen = (tl.load(experts) >= 0,)
    factors = (tl.load(weights),)
    for slot in tl.static_range(1, TOP_K):
        chosen = chosen + (tl.load(experts + slot) >= 0,)  # type: ignore[assignment]  # noqa: RUF005
        factors = factors + (tl.load(weights + slot),)  # type: ignore[assignment]  # noqa: RUF005
    wait(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        place = results + (token * TOP_K + slot) * size + column
        result = tl.load(place, mask=(column < size) & chosen[slot], other=0.0)
        total += result.to(tl.float32) * tl.where(chosen[slot], factors[slot], 0.0)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


def combine(results: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's results: [tokens, size], summed in float32.

    results: [tokens * top_k, size]; experts, weights: [tokens, top_k]. Where an expert is -1 the result is not read.
    experts and weights are read before the preceding kernel has ended: another kernel, which waits before it releases
    this one, must come between this one and the kernel that writes them.
    """
    tokens, top_k = experts.shape
    size = results.shape[1]
    out = results.new_empty((tokens, size))
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(size))
        _combine_kernel[(tokens, -(-size // block))](
            out, results, experts, weights, size, TOP_K=top_k, BLOCK=block, num_warps=4, **dependent_launch(out.device)
        )
    return out
