"""Formats of the stacked weights of experts, as the grouped GEMM reads them.

A matrix is [experts, outputs, inputs]. By kind:

- plain: values in the dtype of activations.
- channel: float8 or int8 values; scales [experts, outputs] float32.
- block: float8 or int8 values; scales [experts, outputs / scale_rows, inputs / 128] float32, rounded up.
- int4, fp4: values of 4 bits with scales per group of inputs, of each expert as ops/experts/pack.py describes them; of
  kind fp4 also a factor of all products, [experts] float32.
"""

from __future__ import annotations

from typing import Literal

import torch
from attrs import frozen

BLOCK = 128
"""Inputs that share a scale of kind block."""

Kind = Literal["plain", "channel", "block", "int4", "fp4"]


@frozen(kw_only=True)
class WeightFormat:
    """How the weights of experts are stored."""

    kind: Kind
    dtype: str = ""
    """Dtype of 8-bit values: float8_e4m3fn or int8."""
    scale_rows: int = 1
    """Outputs that share a scale, for kind block."""
    group: int = 0
    """Inputs that share a scale, for the 4-bit kinds: 32, 64 or 128."""

    def __str__(self) -> str:
        more = {"block": f" of {self.scale_rows} outputs", "int4": f" in groups of {self.group}"}
        return f"{self.dtype} {self.kind}".lstrip() + more.get(self.kind, "")

    @property
    def is_4bit(self) -> bool:
        """Whether two values share a byte."""
        return self.kind in ("int4", "fp4")

    def block_k(self, wanted: int) -> int:
        """Inputs per iteration of the GEMM: `wanted`, or BLOCK where scales are per block or group of inputs."""
        return wanted if self.kind in ("plain", "channel") else BLOCK


@frozen(kw_only=True, eq=False)
class ExpertMatrix:
    """One matrix of one expert: a StackedWeight without the dimension of experts."""

    values: torch.Tensor
    scales: torch.Tensor
    factor: torch.Tensor | None = None
    """The power of two that products are multiplied by, for kind fp4: a float32 scalar."""


@frozen(kw_only=True, eq=False)
class StackedWeight:
    """The matrices of all experts."""

    values: torch.Tensor
    format: WeightFormat
    scales: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """Rows of each matrix."""
        return self.values.shape[-2]
