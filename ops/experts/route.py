"""Routing in one kernel: scores of experts from a router's logits, each token's largest scores, and their factors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait


@triton.jit
def _route_kernel(
    experts,
    weights,
    logits,
    stride,
    num_experts,
    first,
    count,
    scale,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Route one token. Grid: (tokens,).

    experts, weights: [tokens, TOP_K] int32, float32. logits: rows of num_experts, `stride` numbers apart. first, count:
    this rank's experts, numbered from 0; others become -1.
    """
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_E)
    present = index < num_experts
    wait(PDL)
    logit = tl.load(logits + row * stride + index, mask=present, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    else:
        powers = tl.exp(logit - tl.max(tl.where(logit == logit, logit, -float("inf")), axis=0))
        scores = powers / tl.sum(powers, axis=0)
    # Scores are not negative, so their bits as integers have the same order, and a warp finds the largest integer in
    # one instruction. A NaN is chosen like a score of 0, and its factor is NaN.
    bits = scores.to(tl.int32, bitcast=True)
    left = tl.where(present, tl.where(scores == scores, bits, 0), -1)
    slot = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    chosen_bits = tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        place = tl.min(tl.where(left == tl.max(left, axis=0), index, BLOCK_E), axis=0)
        chosen = tl.where(slot == k, place, chosen)
        chosen_bits = tl.where(slot == k, tl.max(tl.where(index == place, bits, -(2**31)), axis=0), chosen_bits)
        left = tl.where(index == place, -1, left)
    factors = chosen_bits.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        factors = factors / tl.sum(factors, axis=0)
    chosen -= first
    chosen = tl.where((chosen >= 0) & (chosen < count), chosen, -1)
    tl.store(experts + row * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(weights + row * TOP_K + slot, factors * scale, mask=slot < TOP_K)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    rank_experts: range,
    sigmoid: bool = False,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, [tokens, top_k] int32, and their factors, float32, by descending score.

    logits: [tokens, experts], each row contiguous. sigmoid: scores are sigmoids, not a softmax. renormalize: factors
    are divided by their sum. rank_experts: this rank's, which are numbered from 0; others become -1.
    """
    tokens, num_experts = logits.shape
    experts = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            experts,
            weights,
            logits,
            logits.stride(0),
            num_experts,
            rank_experts.start,
            len(rank_experts),
            scale,
            TOP_K=top_k,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
            num_warps=1 if num_experts <= 128 else 4,
            **dependent_launch(logits.device),
        )
    return experts, weights
