"""The norm and the router's logits in one kernel, next to the kernel of the norm and a product in float64."""

from __future__ import annotations

import pytest
import torch

from engine.ops.experts.norm_router import MAX_PRODUCTS, MAX_TOKENS, norm_and_logits, suits
from engine.ops.norm.rms_norm import add_rms_norm


def check(
    tokens: int, size: int, experts: int, device: torch.device, half: torch.dtype, *, residual: bool, bias: bool
) -> None:
    x = torch.randn(tokens, size, device=device).to(half)
    before = torch.randn(tokens, size, device=device).to(half) if residual else None
    weight = torch.randn(size, device=device).to(half)
    router = (torch.randn(experts, size, device=device) * size**-0.5).to(half)
    added = torch.randn(experts, device=device).to(half) if bias else None
    wanted, total = add_rms_norm(x, None if before is None else before.clone(), weight, 1e-5)
    normed, next_residual, logits = norm_and_logits(x, before, weight, 1e-5, router, added)
    assert torch.equal(normed, wanted)
    assert torch.equal(next_residual, total)
    products = normed.double() @ router.double().T
    exact = products if added is None else products + added.double()
    torch.testing.assert_close(logits.double(), exact, rtol=torch.finfo(half).eps, atol=1e-5 * size**0.5)


@pytest.mark.parametrize(("tokens", "size", "experts"), [(1, 2048, 128), (3, 288, 5), (8, 96, 33)])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_norm_equals_that_of_the_norm_kernel_and_logits_are_its_products(
    tokens: int, size: int, experts: int, residual: bool, bias: bool, device: torch.device, half: torch.dtype
) -> None:
    check(tokens, size, experts, device, half, residual=residual, bias=bias)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize(("size", "experts"), [(2048, 129), (2880, 32), (4096, 8), (5120, 160), (7168, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_and_logits_at_real_sizes(
    tokens: int, size: int, experts: int, dtype: torch.dtype, device: torch.device
) -> None:
    check(tokens, size, experts, device, dtype, residual=True, bias=True)


def test_norm_weight_in_float32_is_not_rounded(device: torch.device, half: torch.dtype) -> None:
    x = torch.randn(2, 64, device=device).to(half)
    weight = 1 + torch.randn(64, device=device) * 1e-4
    wanted, _ = add_rms_norm(x, None, weight, 1e-5)
    router = torch.zeros(3, 64, device=device, dtype=half)
    assert torch.equal(norm_and_logits(x, None, weight, 1e-5, router, None)[0], wanted)


def test_few_contiguous_tokens_and_small_routers_suit() -> None:
    x, router = torch.zeros(2 * MAX_TOKENS, 8), torch.zeros(3, 8)
    few = x[:MAX_TOKENS]
    assert suits(few, None, router)
    assert suits(x[:1], x[:1], router)
    assert not suits(x[: MAX_TOKENS + 1], None, router)
    assert not suits(x[:0], None, router)
    assert not suits(x[::2], None, router)
    assert not suits(few, x[::2], router)
    assert not suits(few[None], None, router)
    largest = torch.empty(MAX_PRODUCTS // few.numel(), 8, device="meta")
    assert suits(few, None, largest)
    assert not suits(few, None, torch.empty(len(largest) + 1, 8, device="meta"))
