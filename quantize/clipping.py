"""Ranges of groups: numbers at a group's ends may be cut off, where the finer steps in between gain more.

AutoAWQ searches so after scaling; it serves GPTQ as well, wherever scales are chosen before codes.
"""

from __future__ import annotations

import torch

from engine.quantize.grid import Grid, grouped

SHRINKS = 10
"""Shares of a group's range that are tried: 1 downwards in steps of 0.05."""


def clip(weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bounds for round_to_nearest that lose least: each group's range, shrunk by a share of its own.

    A group's error is taken by itself, without what it has in common with others': tr(D H_gg D^T).
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
