"""Norm and quantization in one kernel: the quantized values of two separate kernels, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core.distributed.partial_sum import sum_addends
from engine.ops.activation.quantize_rows import quantize_rows
from engine.ops.norm import rms_norm as norm
from engine.ops.norm.rms_norm import MAX_SINGLE_ROWS, add_rms_norm
from engine.ops.norm.rms_norm_quantize import add_rms_norm_quantize

CODES = [torch.float8_e4m3fn, torch.int8]
EPS = 1e-5


def check(x: Any, residual: Any, weight: Any, dtype: Any, scale: Any = None) -> Any:
    """And the sum, where `residual` was."""
    theirs, ours = (None if residual is None else residual.clone() for _ in range(2))
    normed, total = add_rms_norm(x, theirs, weight, EPS)
    codes, scales = quantize_rows(normed, dtype, scale=scale)
    got, got_scales, got_total = add_rms_norm_quantize(x, ours, weight, EPS, dtype, scale=scale)
    assert got_total is (x if residual is None else ours)
    assert torch.equal(got_total.view(torch.int16), total.view(torch.int16))
    assert torch.equal(got_scales.view(torch.int32), scales.view(torch.int32))
    assert (got.dtype, got.shape) == (dtype, codes.shape)
    whole = ~scales.isnan()
    assert torch.equal(got.view(torch.uint8)[whole], codes.view(torch.uint8)[whole])
    return got, got_scales


def operands(rows: Any, size: Any, dtype: Any, device: Any) -> Any:
    x, residual = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
    return x, residual, torch.randn(size, device=device).to(dtype)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 24), (3, 64), (2, 200), (5, 1000), (2, 4096)])
def test_fused_kernel_equals_two_kernels(rows: int, size: int, half: Any, dtype: Any, device: torch.device) -> None:
    x, residual, weight = operands(rows, size, half, device)
    codes, scales = check(x, residual, weight, dtype)
    assert codes.float().any()
    assert not (scales == 1).any()
    check(x, None, weight, dtype)


def check_addends(count: int, rows: int, size: int, half: Any, dtype: Any, device: torch.device) -> None:
    x, residual, weight = operands(rows, size, half, device)
    others = [torch.randn_like(x) for _ in range(count - 1)]
    for given in (residual, None):
        theirs, ours = (None if given is None else given.clone() for _ in range(2))
        expected = add_rms_norm_quantize(sum_addends([x, *others]), theirs, weight, EPS, dtype)
        found = add_rms_norm_quantize(x, ours, weight, EPS, dtype, others=others)
        for one, wanted in zip(found, expected, strict=True):
            assert torch.equal(one.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize(("count", "rows", "size"), [(2, 3, 64), (3, 2, 200), (4, 5, 1000)])
def test_sum_of_addends_is_rounded_before_the_residual(
    count: int, rows: int, size: int, dtype: Any, device: torch.device
) -> None:
    check_addends(count, rows, size, torch.float16, dtype, device)  # the interpreter cuts bfloat16 off


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize(("rows", "size"), [(512, 4096), (4096, 4096), (1024, 5120)])
@pytest.mark.parametrize("count", [2, 4])
def test_addends_at_real_sizes(count: int, rows: int, size: int, dtype: Any, device: torch.device) -> None:
    check_addends(count, rows, size, torch.bfloat16, dtype, device)


@pytest.mark.parametrize("size", [24, 600])
def test_several_rows_per_program(size: int, device: torch.device, half: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "MAX_SINGLE_ROWS", 2)
    assert norm.norm_tile(size, 5)[1] > 1
    check(*operands(5, size, half, device), torch.int8)


@pytest.mark.parametrize("dtype", CODES)
def test_given_scale_is_used(dtype: Any, device: torch.device, half: Any) -> None:
    x, residual, weight = operands(3, 300, half, device)
    limit = 448 if dtype == torch.float8_e4m3fn else 127
    codes, scales = check(x, residual, weight, dtype, torch.tensor([1 / limit], device=device))  # which clamps many
    assert scales.tolist() == pytest.approx([1 / limit] * 3)
    assert (codes.float().abs() == limit).any(1).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # infinities, in the interpreter
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("given", [False, True])
def test_row_that_is_not_finite_has_scale_nan(
    broken: Any, dtype: Any, given: Any, device: torch.device, half: Any
) -> None:
    x, residual, weight = operands(4, 200, half, device)
    x[1, 150] = broken
    residual[2, 7] = broken
    _, scales = check(x, residual, weight, dtype, torch.ones(1, device=device) if given else None)
    assert scales.isnan().tolist() == [False, True, True, False]


def test_rows_of_zeros_equal_two_kernels(device: torch.device, half: Any) -> None:
    x = torch.zeros(2, 40, dtype=half, device=device)
    codes, scales = check(x, x.clone(), torch.ones(40, dtype=half, device=device), torch.int8)
    assert not codes.any()
    assert scales.tolist() == [1, 1]


def test_no_rows_and_strided_rows(device: torch.device, half: Any) -> None:
    x, residual, weight = operands(3, 96, half, device)
    check(x[:0], residual[:0], weight, torch.int8)
    wide = torch.cat([x, x], 1)[:, :96]
    codes, scales, _ = add_rms_norm_quantize(wide, residual.clone(), weight, EPS, torch.int8)
    expected, expected_scales = check(x, residual, weight, torch.int8)
    assert torch.equal(codes, expected)
    assert torch.equal(scales, expected_scales)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [896, 1024, 4096, 5120, 8192])
def test_fused_kernel_equals_two_kernels_at_real_sizes(size: int, half: Any, dtype: Any, device: torch.device) -> None:
    for rows in (1, 33, 64, 256, MAX_SINGLE_ROWS, MAX_SINGLE_ROWS + 1, 4096):
        x, residual, weight = operands(rows, size, half, device)
        check(x, residual, weight, dtype)
        check(x, None, weight, dtype, torch.tensor([0.02], device=device))
