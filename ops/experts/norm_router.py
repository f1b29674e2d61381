"""The norm before a mixture of experts and the router's logits in one kernel, for few tokens.

Each program computes the norm of a token again, which takes less time than another launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.norm.rms_norm import norm_of_rows, norm_tile

MAX_TOKENS = 2
"""Maximum tokens. With more, decode steps of some models were slower."""
MAX_PRODUCTS = 2**22
"""Maximum products of weights and inputs, over all tokens. The router's matrix is read again for each token."""
LOGITS = 4
"""Logits per program."""


@triton.jit(do_not_specialize=["num_logits"])
def _norm_router_kernel(
    normed,
    total,
    logits,
    x,
    residual,
    weight,
    router,
    bias,
    num_logits,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOGITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (blocks of LOGITS logits, tokens). The programs of the first block store the norm and the sum."""
    release(PDL)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    logit = tl.program_id(0) * LOGITS + tl.arange(0, LOGITS)
    exists = logit < num_logits
    matrix = tl.load(
        router + logit.to(tl.int64)[:, None] * SIZE + column[None, :], mask=exists[:, None] & inside[None, :], other=0.0
    )
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros([LOGITS], tl.float32)
    if BIAS:
        added = tl.load(bias + logit, mask=exists, other=0.0).to(tl.float32)
    token = tl.program_id(1)
    place = (token * SIZE + column)[None, :]
    stores = inside[None, :] & (tl.program_id(0) == 0)
    wait(PDL)
    value = tl.load(x + place, mask=inside[None, :], other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + place, mask=inside[None, :], other=0.0).to(tl.float32)
        kept = value.to(total.dtype.element_ty)
        tl.store(total + place, kept, mask=stores)
        value = kept.to(tl.float32)
    result = norm_of_rows(value, scale, eps, SIZE).to(normed.dtype.element_ty)
    tl.store(normed + place, result, mask=stores)
    sums = tl.sum(matrix.to(tl.float32) * result.to(tl.float32), axis=1) + added
    tl.store(logits + token * num_logits + logit, sums.to(logits.dtype.element_ty), mask=exists)


def suits(x: torch.Tensor, residual: torch.Tensor | None, router: torch.Tensor) -> bool:
    """Whether `norm_and_logits` takes these arguments, and is faster than two kernels."""
    return (
        x.dim() == 2
        and 0 < len(x) <= MAX_TOKENS
        and len(x) * router.numel() <= MAX_PRODUCTS
        and x.is_contiguous()
        and (residual is None or residual.is_contiguous())
    )


def norm_and_logits(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The norm of x + residual, the sum x + residual, and the norm times router^T, plus bias: all in x's dtype.

    x, residual: [tokens, size], which `suits` accepts; without a residual the sum is x itself. weight: [size], of
    the norm. router: [logits, size], contiguous. The norm and the sum have the same bits as those of `add_rms_norm`,
    and the logits are of the rounded norm.
    """
    tokens, size = x.shape
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    logits = x.new_empty((tokens, len(router)))
    block, _, warps = norm_tile(size, tokens)
    _norm_router_kernel[(triton.cdiv(len(router), LOGITS), tokens)](
        normed,
        total,
        logits,
        x,
        x if residual is None else residual,
        weight,
        router,
        router if bias is None else bias,
        len(router),
        eps,
        SIZE=size,
        BLOCK=block,
        LOGITS=LOGITS,
        HAS_RESIDUAL=residual is not None,
        BIAS=bias is not None,
        num_warps=warps,
        **dependent_launch(x.device),
    )
    return normed, total, logits
