from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.core.errors import CheckpointError
from engine.quantize.awq import plain
from engine.quantize.grid import Grid, round_to_nearest

from .references import nearest


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [16, -1])
def test_round_to_nearest_equals_the_formula(bits: int, symmetric: bool, size: int) -> None:
    weight = torch.randn(5, 48, generator=torch.Generator().manual_seed(1)) + 0.3
    grid = Grid(bits=bits, symmetric=symmetric, scale_dtype=torch.float32)
    found = round_to_nearest(weight, grid, size)
    codes, numbers = nearest(weight.numpy().astype(np.float64), bits, 48 if size == -1 else size, symmetric)
    # The largest weight of a symmetric group lies in the middle between two codes, and either is right.
    scales = np.repeat(found.scales.numpy().T.astype(np.float64), 48 if size == -1 else size, axis=1)
    middle = np.abs(weight.numpy() / scales % 1 - 0.5) < 1e-4
    difference = np.abs(found.values.numpy() - codes)
    assert middle.mean() <= 1 / 16
    assert not difference[~middle].any()
    assert difference.max() <= 1
    off = (plain(found, grid, size) - weight).abs().double()
    torch.testing.assert_close(off, (torch.from_numpy(numbers) - weight).abs(), atol=1e-4, rtol=0)


def test_scales_are_rounded_before_values_are_quantized() -> None:
    """In bfloat16 a scale is off by up to 0.4 %: values quantized by the unrounded one would be off by a step."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    grid = Grid(bits=8, symmetric=True, scale_dtype=torch.bfloat16)
    found = round_to_nearest(weight, grid, -1)
    assert found.scales.dtype == torch.bfloat16
    inner = (found.values > 0) & (found.values < 255)
    off = (plain(found, grid, -1) - weight).abs() / found.scales.float().T
    assert float(off[inner].max()) <= 0.5 + 1e-3


def test_groups_of_zeros_stay_zeros() -> None:
    grid = Grid(bits=4, symmetric=True, scale_dtype=torch.float16)
    found = round_to_nearest(torch.zeros(2, 32), grid, 16)
    assert float(found.scales.min()) > 0
    assert not plain(found, grid, 16).any()


def test_weights_with_nan_are_an_error() -> None:
    grid = Grid(bits=4, symmetric=True, scale_dtype=torch.float16)
    for bad in (float("nan"), float("inf"), 1e7):
        with pytest.raises(CheckpointError, match="not finite, or its scale is too large for float16"):
            round_to_nearest(torch.tensor([[bad, *[1.0] * 15]]), grid, 16)
