"""Formats of the stacked weights of experts, as the grouped GEMM reads them.

A matrix is [experts, outputs, inputs]. By kind:

- plain: values in the dtype of activations.
- channel: float8 or int8 values; scales [experts, outputs] float32.
- block: float8 or int8 values; scales [experts, outputs / scale_rows, inputs / 128] float32, rounded up.
- int4: values q of 4 bits, and weights (q - zero point) * scale per group of inputs; scales [experts, groups, outputs]
  of a float dtype; zero points the same in uint8, or all 8.
- fp4: values of 4 bits (E2M1), and scales 2^(s - 127), s [experts, groups, outputs] uint8, per group of 32 inputs.

4-bit values are [experts, outputs, blocks * span] uint8: inputs are padded to blocks of 2 * span, the first half of a
block in the low nibbles and the second half in the high ones.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from attrs import frozen

BLOCK = 128
"""Inputs that share a scale of kind block."""
MIN_SPAN = 64
"""Bytes of a row of 4-bit values that the GEMM reads at a time, at least."""
FP4_GROUP = 32

Kind = Literal["plain", "channel", "block", "int4", "fp4"]


@frozen(kw_only=True)
class WeightFormat:
    """How the weights of experts are stored."""

    kind: Kind
    dtype: str = ""
    """Of values of 8 bits: float8_e4m3fn or int8."""
    scale_rows: int = 1
    """Of kind block: outputs that share a scale."""
    group: int = 0
    """Of the 4-bit kinds: inputs that share a scale: 32, 64 or 128."""

    def __str__(self) -> str:
        more = {"block": f" of {self.scale_rows} outputs", "int4": f" in groups of {self.group}"}
        return f"{self.dtype} {self.kind}".lstrip() + more.get(self.kind, "")

    @property
    def is_4bit(self) -> bool:
        """Whether two values share a byte."""
        return self.kind in ("int4", "fp4")

    def block_k(self, wanted: int) -> int:
        """Inputs per iteration of the GEMM, where that many are wanted."""
        if self.is_4bit:
            return 2 * self.span
        return BLOCK if self.kind == "block" else wanted

    @property
    def span(self) -> int:
        """Of the 4-bit kinds: half the inputs of a block."""
        return max(self.group, MIN_SPAN)

    def pack(self, values: torch.Tensor, filler: torch.Tensor | int = 0) -> torch.Tensor:
        """4-bit values of one expert, [outputs, inputs] uint8 -> packed, [outputs, blocks * span] uint8.

        filler: the value of inputs that are added to fill the last block, which must mean 0: one, or one per output.
        """
        outputs, inputs = values.shape
        blocks = -(-inputs // (2 * self.span))
        padded = F.pad(values, (0, blocks * 2 * self.span - inputs))
        if padded.shape[1] > inputs:
            padded[:, inputs:] = filler if isinstance(filler, int) else filler[:, None]
        halves = padded.view(outputs, blocks, 2, self.span)
        return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(outputs, -1)

    def pad_groups(self, groups: torch.Tensor, inputs: int) -> torch.Tensor:
        """Scales or zero points of one expert, [groups, outputs] -> with as many groups as the blocks have."""
        wanted = -(-inputs // (2 * self.span)) * 2 * self.span // self.group
        if groups.shape[0] < wanted:
            groups = torch.cat((groups, groups[-1:].expand(wanted - groups.shape[0], -1)))
        return groups.contiguous()


@frozen(kw_only=True, eq=False)
class StackedWeight:
    """The matrices of all experts."""

    values: torch.Tensor
    format: WeightFormat
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @property
    def outputs(self) -> int:
        """Rows of each matrix."""
        return self.values.shape[1]
