"""The one layout of 4-bit and 8-bit weights: what plugins/kernels/w4a16.py reads, however a checkpoint stores them.

`words` [blocks, outputs, span] int16: a block is fields * span inputs side by side, with fields = 16 / bits; field j
(from the low end) of word i of a block is its input j * span + i. Inputs beyond the last are 0, and meet zeros.

`scales` [blocks, entries, outputs, 2], of the type of the scales: what the groups of a block have. Without zero points
an entry is the scales of two groups; with them it is the scale of one, and the bits of its offset: a number of the
activations' type which, added to a field read as `power` + q, leaves q - zero point.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.layers.base import torch_dtype

SPANS = (64, 32)
"""Inputs side by side of one field; the larger, the less is spent on counting."""


@frozen(kw_only=True)
class Layout:
    """How one weight matrix is laid out."""

    bits: int
    span: int
    group: int
    """Inputs that share a scale; larger groups are several with equal scales."""

    @classmethod
    def choose(cls, bits: int, group_size: int) -> Layout:
        """For groups of so many inputs, -1: all. Raises CheckpointError for one that fits no span."""
        for span in SPANS:
            block = 16 // bits * span
            for group in (block // 2, block // 4):  # two or four groups a block: 32 or 64 bits of scales
                if group >= span and (group_size == -1 or group_size % group == 0):
                    return cls(bits=bits, span=span, group=group)
        raise CheckpointError(
            f"the checkpoint's weights have groups of {group_size} inputs; use one with groups of a multiple of"
            f" {SPANS[-1]}, or a scale a channel (-1)"
        )

    @property
    def fields(self) -> int:
        """Numbers in a word."""
        return 16 // self.bits

    @property
    def block(self) -> int:
        """Inputs in a block."""
        return self.fields * self.span

    @property
    def groups(self) -> int:
        """In a block."""
        return self.block // self.group

    def power(self, dtype: torch.dtype) -> int:
        """What a field is more than q when it is read as a number: see plugins/kernels/w4a16.py."""
        if dtype == torch.float16:
            return 1024
        return 128 if self.bits == 4 else 0

    def has_zeros(self, scales: torch.Tensor) -> bool:
        """Whether scales from `pack` come with zero points."""
        return scales.shape[1] == self.groups

    def pack(
        self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, dtype: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """words and scales of a matrix.

        values: [outputs, inputs] uint8; scales: [groups, outputs] float16 or bfloat16, and zeros (None: all are
        2^(bits - 1)): the same uint8, for each `group_size` inputs side by side. dtype: of activations.
        """
        outputs, inputs = values.shape
        blocks = -(-inputs // self.block)
        padded = F.pad(values, (0, blocks * self.block - inputs))
        fields = padded.view(outputs, blocks, self.fields, self.span)
        words = fields[:, :, 0].to(torch.int32)
        for field in range(1, self.fields):
            words |= fields[:, :, field].to(torch.int32) << (self.bits * field)
        # Two's complement by arithmetic: what a conversion of numbers out of range does is not defined.
        words = (words - ((words & 0x8000) << 1)).to(torch.int16)
        rows = blocks * self.groups
        repeats = rows if group_size == -1 else group_size // self.group

        def spread(groups: torch.Tensor) -> torch.Tensor:
            all_rows = groups.repeat_interleave(repeats, 0)[:rows]
            return F.pad(all_rows, (0, 0, 0, rows - all_rows.shape[0]))

        if zeros is None:
            entries = spread(scales).view(blocks, self.groups // 2, 2, outputs).transpose(2, 3)
        else:
            kind = torch_dtype(dtype)
            offsets = (-(zeros.to(torch.float32) + self.power(kind))).to(kind).view(scales.dtype)
            entries = torch.stack([spread(scales), spread(offsets)], -1).view(blocks, self.groups, outputs, 2)
        return words.transpose(0, 1).contiguous(), entries.contiguous()
