"""Clipped ranges of groups: cutting off a group's extremes may cost less than its finer steps gain.

AutoAWQ does this search after scaling. It also serves GPTQ, if scales are chosen before quantized values.
"""

from __future__ import annotations

import torch

from engine.quantize.grid import Grid, grouped

SHRINKS = 10
"""Fractions of a group's range that are tried: from 1 down in steps of 0.05."""


def clip(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds for round_to_nearest with the smallest error: each group's range, shrunk by its own fraction.

    A group's error is tr(D H_gg D^T), without its correlation with other groups' errors.
    """
    groups = grouped(weight, group_size).transpose(0, 1)  # [groups, outputs, inputs of a group]
    count, _, size = groups.shape
    own = torch.stack([hessian[i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)])
    low, high = groups.aminmax(dim=2)
    bounds = (low, high)
    least = torch.full_like(low, float("inf"))
    for step in range(SHRINKS):
        share = 1 - 0.05 * step
        scale, zero = grid.fit(low * share, high * share)
        change = (grid.encode(groups, scale[..., None], zero[..., None]) - zero[..., None]) * scale[..., None] - groups
        error = ((change @ own) * change).sum(2)
        better = error < least
        least = torch.where(better, error, least)
        bounds = (torch.where(better, low * share, bounds[0]), torch.where(better, high * share, bounds[1]))
    return bounds[0].T, bounds[1].T
