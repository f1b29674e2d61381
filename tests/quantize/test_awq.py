from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.quantize.awq import plain, relative_error, search_scales
from engine.quantize.grid import Grid, round_to_nearest

GRID = Grid(bits=4, symmetric=False, scale_dtype=torch.float16)


def salient(inputs: int = 64, tokens: int = 500, seed: int = 0) -> Any:
    """A weight, and inputs of which a few are fifty times as large as the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inputs, generator=generator)
    x[:, ::16] *= 50
    return torch.randn(48, inputs, generator=generator), x


def test_scales_protect_large_inputs() -> None:
    weight, x = salient()
    hessian = x.T @ x
    scales = search_scales([weight], hessian, x.abs().mean(0), GRID, 32)
    assert float(scales[::16].min()) > 1.5 * float(scales[1::16].mean())
    rounded = plain(round_to_nearest(weight * scales, GRID, 32), GRID, 32) / scales
    by_rounding = plain(round_to_nearest(weight, GRID, 32), GRID, 32)
    errors = [float((x @ (one - weight).T).norm()) for one in (rounded, by_rounding)]
    assert errors[0] < 0.6 * errors[1]


def test_shared_scales_are_equal() -> None:
    weight, x = salient()
    shared = torch.arange(64) % 16 + torch.arange(64) // 32 * 16  # two inputs each
    scales = search_scales([weight, weight * 2], x.T @ x, x.abs().mean(0), GRID, 32, shared)
    assert scales.unique().numel() > 4
    for number in range(32):
        assert scales[shared == number].unique().numel() == 1


def test_without_outliers_the_error_does_not_grow() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    hessian = torch.eye(64)
    scales = search_scales([weight], hessian, torch.ones(64), GRID, 32)
    change = plain(round_to_nearest(weight * scales, GRID, 32), GRID, 32) / scales - weight
    rounded = plain(round_to_nearest(weight, GRID, 32), GRID, 32) - weight
    assert relative_error(change, weight, hessian) <= relative_error(rounded, weight, hessian)


def test_relative_error_is_that_of_outputs() -> None:
    weight, x = salient()
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1
    expected = float((x @ change.T).norm() / (x @ weight.T).norm())
    assert relative_error(change, weight, x.T @ x) == pytest.approx(expected, rel=1e-4)
    assert relative_error(change, weight * 0, x.T @ x) == 0
