"""The weight-only GEMMs of a quantization method's layers: one per GPU, whose workspace all layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul


class WeightOnlyMatmuls:
    """One WeightOnlyMatmul per device, made on first use."""

    def __init__(self) -> None:
        self._made: dict[torch.device, WeightOnlyMatmul] = {}

    def on(self, device: torch.device) -> WeightOnlyMatmul:
        """The WeightOnlyMatmul of one GPU."""
        from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul

        if device not in self._made:
            self._made[device] = WeightOnlyMatmul(device)
        return self._made[device]
