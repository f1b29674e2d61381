from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.ops.activation import quantize_rows as kernel
from engine.ops.gemm.packed_layout import W8Layout

FP8 = torch.float8_e4m3fn


def quantize_rows(x: Any, dtype: Any, **settings: Any) -> Any:
    """Codes in the order of x's inputs; and there are zeros beyond them."""
    codes, scales = kernel.quantize_rows(x, dtype, **settings)
    assert codes.shape == (x.shape[0], -(-x.shape[1] // 128) * 128)
    layout = W8Layout(dtype=str(dtype).removeprefix("torch."))
    whole = layout.unpack(codes, codes.shape[1])
    assert not whole[:, x.shape[1] :].float().any()
    return whole[:, : x.shape[1]], scales


def test_values_are_in_the_order_of_a_w8_layout(device: torch.device) -> None:
    x = torch.arange(256.0, device=device)[None] - 128
    codes, _ = kernel.quantize_rows(x, torch.int8, scale=torch.ones(1, device=device))
    assert codes[0, :6].tolist() == [-127, -64, -127, -63, -126, -62]
    assert codes[0, 128:132].tolist() == [0, 64, 1, 65]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inputs", [1, 100, 300, 1024])
def test_int8_values_are_the_nearest(inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, inputs, device=device).to(dtype)
    x[1] = 0
    codes, scale = quantize_rows(x, torch.int8)
    assert (codes.dtype, scale.shape, scale.dtype) == (torch.int8, (3,), torch.float32)
    torch.testing.assert_close(scale[[0, 2]], x.float().abs().amax(1)[[0, 2]] / 127)
    exact = x.double() / scale.double()[:, None]
    assert float((codes.double() - exact).abs().max()) <= 0.5 + 1e-4
    assert codes.abs().amax(1).tolist() == [127, 0, 127]


def test_ties_round_to_even(device: torch.device) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], device=device)
    assert quantize_rows(x, torch.int8)[0].tolist() == [[127, 0, 2, 2, 0, -2]]


def test_fp8_values_are_exact(device: torch.device) -> None:
    grid = torch.randn(5, 300, device=device).to(FP8).float().clamp(-14, 14)
    grid[:, [0, 130, 299]] = -14.0  # the largest: 14 * 32 is 448, so codes are numbers times 32
    codes, scale = quantize_rows(grid / 8, FP8)
    assert scale.shape == (5,)
    torch.testing.assert_close(scale, torch.full_like(scale, 1 / 256), rtol=0, atol=0)
    large = grid.abs() >= 2.0**-5  # smaller ones are no longer exact times 32 with three bits, if they are subnormal
    torch.testing.assert_close(codes.float()[large], grid[large] * 32, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_static_scale_clamps(dtype: Any, device: torch.device) -> None:
    limit = 448.0 if dtype == FP8 else 127.0
    x = torch.tensor([[1.0, 2.0, 2.5, 1e6, -1e6]], device=device)
    codes, scale = quantize_rows(x, dtype, scale=torch.tensor([0.5], device=device))
    assert scale.tolist() == [0.5]
    assert codes.float().tolist() == [[2, 4, 5, limit, -limit]]


@pytest.mark.filterwarnings("ignore:invalid value")  # infinities, in the interpreter
@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("given", [False, True])
def test_a_row_that_is_not_finite_has_the_scale_nan(broken: Any, dtype: Any, given: bool, device: torch.device) -> None:
    x = torch.ones(3, 200, device=device)
    x[1, 150] = broken
    scale = torch.ones(1, device=device) if given else None
    _, got = quantize_rows(x, dtype, scale=scale)
    assert got.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_rows_too_small_for_a_scale_become_zeros(dtype: Any, device: torch.device) -> None:
    x = torch.zeros(2, 130, device=device)
    x[0, 7], x[1, 8] = 1e-38, 1e-20
    codes, scale = quantize_rows(x, dtype)
    limit = 448.0 if dtype == FP8 else 127.0
    assert codes[0].float().abs().max() < 0.02  # the interpreter rounds to float8 wrongly
    assert codes[1, 6:9].float().tolist() == [0, 0, limit]
    assert scale.tolist() == pytest.approx([1, 1e-20 / limit], rel=1e-6, abs=0)


def test_quantize_rows_takes_no_rows(device: torch.device) -> None:
    codes, scale = quantize_rows(torch.empty(0, 16, device=device), FP8)
    assert (codes.shape, scale.shape) == ((0, 16), (0,))


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [4096, 14336, 5000])
def test_fp8_on_a_gpu_rounds_as_torch_does(inputs: int) -> None:
    x = torch.randn(64, inputs, device="cuda").bfloat16()
    codes, scale = quantize_rows(x, FP8)
    expected = (x.float() / scale[:, None]).clamp(-448, 448).to(FP8)
    # The division may differ in the last bit, and then a tie may go the other way.
    different = (codes.float() != expected.float()).float().mean()
    assert float(different) < 1e-3
    torch.testing.assert_close(codes.float(), expected.float(), rtol=0.13, atol=2.0**-9)
