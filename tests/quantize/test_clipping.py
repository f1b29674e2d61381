from __future__ import annotations

import pytest
import torch

from engine.quantize.awq import plain
from engine.quantize.clipping import clip
from engine.quantize.grid import Grid, round_to_nearest

GRID = Grid(bits=4, symmetric=False, scale_dtype=torch.float16)


def test_clipping_is_the_best_of_the_fractions_tried() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator)
    x = torch.randn(500, 32, generator=generator) * (torch.arange(32) % 7 + 1)
    weight[:, 3] *= 4  # a lone large number makes the whole group coarse
    x[:, 3] *= 0.01
    hessian = x.T @ x
    low, high = clip(weight, hessian, GRID, 16)
    for row in range(4):
        for group in range(2):
            part = slice(16 * group, 16 * group + 16)
            errors = {}
            for step in range(10):
                share = 1 - 0.05 * step
                own = weight[row : row + 1, part]
                bounds = own.amin(1, keepdim=True) * share, own.amax(1, keepdim=True) * share
                change = plain(round_to_nearest(own, GRID, 16, bounds), GRID, 16) - own
                errors[share] = float((x[:, part] @ change.T).norm())
            best = min(errors, key=errors.__getitem__)
            assert float(low[row, group]) == pytest.approx(float(weight[row, part].min()) * best, rel=1e-5)
            assert float(high[row, group]) == pytest.approx(float(weight[row, part].max()) * best, rel=1e-5)
    assert float(high[:, 0].mean()) < 0.95 * float(weight[:, :16].amax(1).mean())
