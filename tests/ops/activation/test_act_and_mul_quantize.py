"""Activation and quantization in one kernel: the quantized values of two separate kernels, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.activation.act_and_mul_quantize import act_and_mul_quantize
from engine.ops.activation.quantize_rows import quantize_rows

CODES = [torch.float8_e4m3fn, torch.int8]


def check(x: Any, dtype: Any, scale: Any = None, activation: str = "silu") -> Any:
    codes, scales = quantize_rows(act_and_mul(x, activation), dtype, scale=scale)
    got, got_scales = act_and_mul_quantize(x, dtype, activation, scale=scale)
    assert torch.equal(got_scales.view(torch.int32), scales.view(torch.int32))
    assert (got.dtype, got.shape) == (dtype, codes.shape)
    whole = ~scales.isnan()
    assert torch.equal(got.view(torch.uint8)[whole], codes.view(torch.uint8)[whole])
    return got, got_scales


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 24), (2, 200), (5, 1000), (2, 3072)])
def test_equals_two_kernels_bit_for_bit(
    rows: int, size: int, half: torch.dtype, dtype: Any, device: torch.device
) -> None:
    x = (torch.randn(rows, 2 * size, device=device) * 4).to(half)
    codes, _ = check(x, dtype)
    assert codes.float().any()


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "swiglu_oai"])
def test_other_activations_equal_two_kernels(activation: str, device: torch.device, half: torch.dtype) -> None:
    check((torch.randn(3, 400, device=device) * 4).to(half), torch.int8, activation=activation)


@pytest.mark.parametrize("dtype", CODES)
def test_a_static_scale_clamps_large_values(dtype: Any, device: torch.device, half: torch.dtype) -> None:
    x = (torch.randn(3, 600, device=device) * 4).to(half)
    limit = 448 if dtype == torch.float8_e4m3fn else 127
    codes, _ = check(x, dtype, torch.tensor([1 / limit], device=device))  # which clamps many
    assert (codes.float().abs() == limit).any(1).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # infinities, in the interpreter
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("given", [False, True])
def test_a_row_that_is_not_finite_has_the_scale_nan(
    broken: Any, dtype: Any, given: bool, device: torch.device, half: torch.dtype
) -> None:
    x = torch.ones(4, 400, dtype=half, device=device)
    x[1, 150] = broken  # the gate: of -inf silu is 0 * -inf
    x[2, 350] = broken
    _, scales = check(x, dtype, torch.ones(1, device=device) if given else None)
    assert scales.isnan().tolist() == [False, True, True, False]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_products_beyond_the_dtypes_range(device: torch.device) -> None:
    """The activation is rounded before it is quantized, here to infinity."""
    x = torch.ones(2, 80, dtype=torch.float16, device=device)
    x[1] = 300.0
    _, scales = check(x, torch.int8)
    assert scales.isnan().tolist() == [False, True]


def test_no_rows_and_strided_ones(device: torch.device, half: torch.dtype) -> None:
    x = torch.randn(3, 80, device=device).to(half)
    check(x[:0], torch.int8)
    codes, scales = check(x, torch.int8)
    got, got_scales = act_and_mul_quantize(torch.cat([x, x], 1)[:, :80], torch.int8)
    assert torch.equal(got, codes)
    assert torch.equal(got_scales, scales)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [3072, 4864, 14336, 28672])
def test_fused_kernel_equals_two_kernels_at_real_sizes(
    size: int, half: torch.dtype, dtype: Any, device: torch.device
) -> None:
    for rows in (1, 33, 64, 256, 2048):
        x = torch.randn(rows, 2 * size, device=device).to(half)
        check(x, dtype)
        check(x, dtype, torch.tensor([0.02], device=device))
