"""Integer grids: scales and zero points of groups of weights, and rounding to nearest.

A weight is scale * (quantized value - zero point), with quantized values from 0 to 2^bits - 1. Symmetric groups have
the zero point 2^(bits - 1) and a scale of max |w| / (2^bits - 1) * 2; others span [min(w, 0), max(w, 0)].
"""

from __future__ import annotations

import torch
from attrs import frozen

from engine.core.errors import CheckpointError
from engine.plugins.quant.w4a16 import QuantizedWeight

TINY = {torch.float16: 2.0**-20}
"""Smallest scale by dtype, for groups of zeros. The next smaller ones have hardly any digits left in float16."""


@frozen(kw_only=True)
class Grid:
    """The grid of a group's quantized values."""

    bits: int
    symmetric: bool
    scale_dtype: torch.dtype
    """Scales are rounded to this dtype before values are quantized, so that storing them loses nothing."""

    @property
    def top(self) -> int:
        """The largest quantized value."""
        return (1 << self.bits) - 1

    def fit(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points (float32, the shape of `low`) of groups with weights in [low, high].

        Raises CheckpointError if a scale overflows the dtype of scales.
        """
        if self.symmetric:
            scale = self._stored(torch.maximum(-low, high) * 2 / self.top)
            return scale, torch.full_like(scale, 2 ** (self.bits - 1))
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = self._stored((high - low) / self.top)
        return scale, (-low / scale).round_().clamp_(0, self.top)

    def encode(self, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """The nearest quantized values, in float32."""
        return (weight / scale).round_().add_(zero).clamp_(0, self.top)

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        scale = scale.clamp_min(TINY.get(self.scale_dtype, 1e-30)).to(self.scale_dtype).float()
        if not bool(scale.isfinite().all()):
            raise CheckpointError(
                f"a weight is not finite, or its scale is too large for {str(self.scale_dtype).removeprefix('torch.')}"
            )
        return scale


def grouped(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """weight: [outputs, inputs] -> [outputs, groups, inputs of a group]."""
    return weight.reshape(weight.shape[0], -1, weight.shape[1] if group_size == -1 else group_size)


def round_to_nearest(
    weight: torch.Tensor, grid: Grid, group_size: int, bounds: tuple[torch.Tensor, torch.Tensor] | None = None
) -> QuantizedWeight:
    """Quantize weight, [outputs, inputs] float32, by rounding to nearest.

    bounds: smallest and largest weight of each group, [outputs, groups]; None: taken from the weight.
    """
    groups = grouped(weight, group_size)
    scale, zero = grid.fit(*(bounds or groups.aminmax(dim=2)))
    codes = grid.encode(groups, scale[..., None], zero[..., None])
    return assemble(codes.reshape(weight.shape), scale, zero, grid)


def assemble(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, grid: Grid, group_of: torch.Tensor | None = None
) -> QuantizedWeight:
    """codes: [outputs, inputs]; scale and zero: [outputs, groups]; all float32 -> the dtypes that formats store."""
    return QuantizedWeight(
        values=codes.to(torch.uint8),
        scales=scale.T.to(grid.scale_dtype).contiguous(),
        zeros=zero.T.to(torch.uint8).contiguous(),
        group_of=group_of,
    )
