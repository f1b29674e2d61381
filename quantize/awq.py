"""AWQ (arXiv:2306.00978): inputs with large activations are scaled up before rounding, so that they lose less.

Weights W become W s, their inputs x / s; folding.py says who divides. Outputs are compared by means of H = X^T X: the
squared error of a change D of W is tr(D H D^T), so that no activation has to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.plugins.quant.w4a16 import GroupScheme, QuantizedWeight
from engine.quantize.grid import Grid, grouped, round_to_nearest

EXPONENTS = 20
"""Of s = magnitude^a, a from 0 on in as many steps to 1 (equation 5)."""


def relative_error(change: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """|X D^T| / |X W^T| for a change D of a weight W, [outputs, inputs]; 0 where there is no output."""
    squares = [float(((one @ hessian) * one).sum()) for one in (change, weight)]
    return (max(squares[0], 0.0) / squares[1]) ** 0.5 if squares[1] > 0 else 0.0


def search_scales(
    weights: Sequence[torch.Tensor],
    hessian: torch.Tensor,
    magnitudes: torch.Tensor,
    grid: Grid,
    group_size: int,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """The s of the least error: [inputs], each above 0.

    weights: [outputs, inputs], of linear layers that share their inputs; each one's squared error counts relative to
    its outputs. magnitudes: [inputs], the mean |x|. shared: [inputs] int64, which scale an input has; None: its own.
    Equation 5's family is tried, and the same divided by the weights' own magnitudes, as AutoAWQ does.
    """
    both = torch.cat(list(weights))
    relative = grouped(both.abs(), group_size)
    relative = (relative / relative.amax(2, keepdim=True).clamp_min(1e-12)).reshape(both.shape).mean(0)
    if shared is not None:
        magnitudes, relative = _pool(magnitudes, shared), _pool(relative, shared)
    best, least = torch.ones_like(magnitudes), float("inf")
    for step in range(EXPONENTS):
        exponent = step / EXPONENTS
        raised = magnitudes.clamp_min(1e-8) ** exponent
        for candidate in (raised, raised / relative.clamp_min(1e-4) ** (1 - exponent)):
            scales = _centred(candidate)
            error = 0.0
            for weight in weights:
                scaled = weight * scales
                rounded = round_to_nearest(scaled, grid, group_size)
                change = plain(rounded, grid, group_size) / scales - weight
                error += relative_error(change, weight, hessian) ** 2
            if error < least:
                best, least = scales, error
    return best


def plain(quantized: QuantizedWeight, grid: Grid, group_size: int) -> torch.Tensor:
    """The weight that codes stand for: [outputs, inputs] float32."""
    return quantized.dequantize(GroupScheme(bits=grid.bits, group_size=group_size))


def _centred(scales: torch.Tensor) -> torch.Tensor:
    """The same ratios about 1, so that neither weights nor inputs leave the range of their type."""
    scales = scales.clamp_min(1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def _pool(values: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Means over the inputs that share a scale, given to each of them."""
    count = int(shared.max()) + 1
    sums = torch.zeros(count, device=values.device).index_add_(0, shared, values)
    return (sums / torch.bincount(shared, minlength=count))[shared]
