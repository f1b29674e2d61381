"""Residual addition and norm against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core.distributed.partial_sum import sum_addends
from engine.ops.norm.rms_norm import MAX_SINGLE_ROWS, add_rms_norm

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # the interpreter cuts bfloat16 off


def reference(x: Any, weight: Any, eps: Any) -> Any:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def check(rows: Any, size: Any, dtype: Any, device: Any) -> None:
    x, residual = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(size, device=device).to(dtype)
    expected = x + residual
    out, total = add_rms_norm(x, residual, weight, 1e-5)
    assert total is residual
    torch.testing.assert_close(total, expected, rtol=0 if dtype == torch.float32 else TOLERANCE[dtype], atol=0)
    expected = total.clone()
    assert out.dtype == dtype
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), reference(expected, weight, 1e-5), rtol=limit, atol=limit * 1e-2)
    before = x.clone()
    out, same = add_rms_norm(x, None, weight, 1e-5)
    assert same is x
    assert torch.equal(x, before)
    torch.testing.assert_close(out.double(), reference(x, weight, 1e-5), rtol=limit, atol=limit * 1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 96), (5, 1000), (2, 4096), (MAX_SINGLE_ROWS + 3, 24)])
def test_add_rms_norm_equals_float64(rows: int, size: int, dtype: Any, device: torch.device) -> None:
    check(rows, size, dtype, device)


def check_addends(count: int, rows: int, size: int, dtype: Any, device: torch.device) -> None:
    """Further addends are added as by operations of their own, in their order and to the last bit."""
    residual, *addends = (torch.randn(rows, size, device=device).to(dtype) for _ in range(1 + count))
    weight = torch.randn(size, device=device).to(dtype)
    for given in (residual, None):
        summed = sum_addends(addends)
        expected, expected_total = add_rms_norm(summed, None if given is None else given.clone(), weight, 1e-5)
        kept = [addend.clone() for addend in addends]
        x, *others = addends
        out, total = add_rms_norm(x, None if given is None else given.clone(), weight, 1e-5, others)
        assert torch.equal(out, expected)
        assert torch.equal(total, expected_total)
        assert all(torch.equal(one, before) for one, before in zip(addends, kept, strict=True)), "overwritten"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts bfloat16 off
@pytest.mark.parametrize(
    ("count", "rows", "size"), [(2, 1, 64), (3, 3, 96), (4, 5, 1000), (4, MAX_SINGLE_ROWS + 3, 24)]
)
def test_sum_of_addends_is_rounded_before_the_residual(
    count: int, rows: int, size: int, dtype: Any, device: torch.device
) -> None:
    check_addends(count, rows, size, dtype, device)


def test_add_rms_norm_of_strided_and_more_dimensional_rows(device: torch.device) -> None:
    weight = torch.randn(32, device=device)
    x = torch.randn(3, 5, 64, device=device)[..., ::2]
    out, total = add_rms_norm(x, None, weight, 1e-5)
    assert out.shape == (3, 5, 32)
    assert torch.equal(total, x)
    torch.testing.assert_close(out.double(), reference(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


def test_add_rms_norm_of_no_rows(device: torch.device) -> None:
    out, total = add_rms_norm(torch.empty(0, 8, device=device), None, torch.ones(8, device=device), 1e-5)
    assert out.shape == total.shape == (0, 8)


def test_row_that_is_not_finite_does_not_affect_others(device: torch.device) -> None:
    x = torch.randn(4, 48, device=device)
    x[2] = float("nan")
    out, _ = add_rms_norm(x, None, torch.ones(48, device=device), 1e-5)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (256, 1024), (8192, 4096), (16384, 1024), (300, 5120)])
def test_add_rms_norm_equals_float64_at_real_sizes(rows: int, size: int, dtype: Any, device: torch.device) -> None:
    check(rows, size, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "size"), [(512, 4096), (4096, 4096), (1024, 5120), (2048, 1024)])
@pytest.mark.parametrize("count", [2, 4])
def test_addends_at_real_sizes(count: int, rows: int, size: int, dtype: Any, device: torch.device) -> None:
    check_addends(count, rows, size, dtype, device)
