"""Rounding against tables written by hand, not against the casts that the code uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.plugins.quant.rounding import FP8, dequantize, expand, quantize, quantize_rows, round_to


def e4m3(code: Any) -> Any:
    """Value of a float8 code by the format's definition: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = torch.tensor([e4m3(code) for code in range(127)])
"""All positive float8 values but NaN."""


def nearest(values: Any) -> Any:
    """The value of the nearest float8 number; the grid is searched."""
    return values.sign() * E4M3[(values.abs()[..., None] - E4M3).abs().argmin(-1)]


def test_round_to_clamps_and_rounds_ties_to_even() -> None:
    values = torch.tensor([0.0, 1.0, -1.0, 448.0, 1000.0, -1000.0, 2.0**-9, 0.1])
    words = [0x00, 0x38, 0xB8, 0x7E, 0x7E, 0xFE, 0x01, 0x1D]
    assert round_to(values, FP8).view(torch.uint8).tolist() == words
    assert round_to(torch.tensor([0.5, 1.5, 2.5, -0.5, 126.9, 300.0, -300.0]), torch.int8).tolist() == [
        0, 2, 2, 0, 127, 127, -127,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("shape", [(200, 300), (128, 256), (5, 7), (1, 130)])
def test_quantize_rounds_to_the_nearest_value(dtype: Any, granularity: str, shape: Any) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).bfloat16()
    codes, scale = quantize(weight, dtype, granularity)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    assert scale.shape == {"tensor": (1,), "channel": (shape[0], 1), "block": blocks}[granularity]
    wide = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(0, shape[1], 128):
            one = {"tensor": (0,), "channel": (row, 0), "block": (row // 128, column // 128)}[granularity]
            wide[row, column : column + 128] = scale[one]
    limit = 448 if dtype == FP8 else 127
    assert float((weight.float() / wide).abs().max()) == pytest.approx(limit)
    scaled = weight.float() / wide
    best = nearest(scaled) if dtype == FP8 else scaled.round()
    # Halfway between two, either is nearest.
    torch.testing.assert_close((codes.float() - scaled).abs(), (best - scaled).abs(), rtol=0, atol=0)
    torch.testing.assert_close(dequantize(codes, scale, torch.float32), codes.float() * wide, rtol=0, atol=0)


def test_large_weights_are_quantized_strip_by_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.plugins.quant.rounding.STRIP_NUMBERS", 1)
    torch.manual_seed(0)
    weight = torch.randn(300, 200)
    for granularity in ("tensor", "channel", "block"):
        codes, scale = quantize(weight, torch.int8, granularity)
        monkeypatch.undo()
        whole, whole_scale = quantize(weight, torch.int8, granularity)
        assert torch.equal(codes, whole)
        assert torch.equal(scale, whole_scale)
        monkeypatch.setattr("engine.plugins.quant.rounding.STRIP_NUMBERS", 1)
        assert torch.equal(dequantize(codes, scale, torch.float32), dequantize(whole, scale, torch.float32))


def test_quantize_keeps_zeros() -> None:
    for granularity in ("tensor", "channel", "block"):
        codes, scale = quantize(torch.zeros(3, 4), FP8, granularity)
        assert not codes.float().any()
        assert not dequantize(codes, scale, torch.float32).any()


def test_expand_repeats_scales_of_blocks_cut_short() -> None:
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    wide = expand(scale, torch.Size((10, 130)), 4)
    assert wide.shape == (10, 130)
    assert wide[[0, 3, 4, 9, 0], [0, 0, 0, 127, 128]].tolist() == [1, 1, 3, 5, 2]
    ones = torch.ones(10, 130).to(FP8)
    torch.testing.assert_close(dequantize(ones, scale, torch.float32, 4), wide, rtol=0, atol=0)


def test_quantize_rows_rounds_and_clamps() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [127.0, 63.5, 1.5]])
    codes, scale = quantize_rows(x)
    assert codes.tolist() == [[64, -127, 32], [0, 0, 0], [127, 64, 2]]
    assert scale[[0, 2], 0].tolist() == pytest.approx([2 / 127, 1])
    codes, scale = quantize_rows(x, torch.tensor([0.5]))
    assert codes.tolist() == [[2, -4, 1], [0, 0, 0], [127, 127, 3]]
    assert scale.tolist() == [[0.5]] * 3


@pytest.mark.parametrize("static", [None, torch.tensor([0.5])])
def test_quantize_rows_marks_rows_that_are_not_finite_by_their_scale(static: torch.Tensor | None) -> None:
    _, scale = quantize_rows(torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [1.0, 1.0]]), static)
    assert scale.isfinite().tolist() == [[False], [False], [True]]
