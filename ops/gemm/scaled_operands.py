"""The operands of a W8A8 GEMM."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.ops.gemm.skinny_launch import Workspace


class ScaledOperands(NamedTuple):
    """x, W, their scales and the bias of a W8A8 GEMM, each as in scaled_matmul.matmul."""

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    @property
    def scales_and_bias(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As arguments of a kernel. The scales of W stand in for a missing bias, which the kernel does not read."""
        return self.x_scale, self.scale, self.scale if self.bias is None else self.bias

    def memory_of_splits(self, workspace: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
        """As arguments of a kernel with split-K: partial sums in the accumulator's dtype, and counters of programs."""
        is_integer = self.x.dtype == torch.int8
        return workspace.partials.view(torch.int32) if is_integer else workspace.partials, workspace.arrivals
