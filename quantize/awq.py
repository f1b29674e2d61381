"""AWQ (arXiv:2306.00978): scales up the weights of inputs with large activations before rounding, to lose less.

Weights W become W s, their inputs x / s; folding.py determines the layer that divides. Outputs are compared through
H = X^T X: the squared error of a change D of W is tr(D H D^T), so that no activation has to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.plugins.quant.w4a16 import GroupScheme, QuantizedWeight
from engine.quantize.grid import Grid, grouped, round_to_nearest

EXPONENTS = 20
"""Number of exponents a tried in s = magnitude^a, from 0 in equal steps towards 1 (equation 5)."""


def relative_error(change: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """|X D^T| / |X W^T| for a change D of a weight W: [outputs, inputs]; 0 if all outputs are 0."""
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
    """The scales s with the smallest error: [inputs], all positive.

    weights: [outputs, inputs], of linear layers that share their inputs; each one's squared error is relative to its
    outputs. magnitudes: [inputs], the mean |x|. shared: [inputs] int64, each input's scale; None: a scale per input.
    Tries the scales of equation 5, and those divided by the weights' magnitudes, as AutoAWQ does.
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
    """The dequantized weight: [outputs, inputs] float32."""
    return quantized.dequantize(GroupScheme(bits=grid.bits, group_size=group_size))


def _centred(scales: torch.Tensor) -> torch.Tensor:
    """The same ratios around 1, so that neither weights nor inputs leave the range of their dtype."""
    scales = scales.clamp_min(1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def _pool(values: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Replace each value by the mean over the inputs that share its scale."""
    count = int(shared.max()) + 1
    sums = torch.zeros(count, device=values.device).index_add_(0, shared, values)
    return (sums / torch.bincount(shared, minlength=count))[shared]
