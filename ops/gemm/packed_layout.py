"""How weights lie in memory for ops/gemm/weight_only.py, however a checkpoint stores them.

`words` [blocks, outputs, span] int16: a block is fields * span inputs side by side, with fields = 16 / bits; field j
(from the low end) of word i of a block is its input j * span + i. Inputs beyond the last are 0, and meet zeros.

In a Layout (whole numbers of 4 or 8 bits, scales of groups) an output's words of one block come before the next
output's. Its `scales` are [blocks, entries, outputs, 2], of the type of the scales: what the groups of a block have.
Without zero points an entry is the scales of two groups; with them it is the scale of one, and the bits of its offset:
a number of the activations' type which, added to a field read as `power` + q, leaves q - zero point.

In a CodeLayout (float8 or int8, scales of outputs or of blocks) all of an output's words come before the next one's, so
that the same memory is a matrix of codes for kernels that multiply codes by codes: its inputs are in another order
within each block, and activations must be in the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from attrs import frozen

SPANS = (64, 32)
"""Inputs side by side of one field; the larger, the less is spent on counting."""


@frozen(kw_only=True)
class Layout:
    """How one weight matrix is laid out."""

    bits: int
    span: int
    group: int
    """Inputs that share a scale; larger groups are several with equal scales."""
    code: ClassVar[str] = "unsigned"
    scaled: ClassVar[str] = "groups"
    scale_rows: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"{self.bits} bits, groups of {self.group}"

    @classmethod
    def choose(cls, bits: int, group_size: int) -> Layout:
        """The layout for groups of this many inputs, -1: one group. Raises ValueError where no layout fits."""
        for span in SPANS:
            block = 16 // bits * span
            for group in (block // 2, block // 4):  # two or four groups a block: 32 or 64 bits of scales
                if group >= span and (group_size == -1 or group_size % group == 0):
                    return cls(bits=bits, span=span, group=group)
        raise ValueError(
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
        """What a field is more than q when it is read as a number: see ops/gemm/weight_only.py."""
        if dtype == torch.float16:
            return 1024
        return 128 if self.bits == 4 else 0

    def has_zeros(self, scales: torch.Tensor) -> bool:
        """Whether scales from `pack` come with zero points."""
        return scales.shape[1] == self.groups

    def pack(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        group_size: int,
        dtype: torch.dtype,
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
            offsets = (-(zeros.to(torch.float32) + self.power(dtype))).to(dtype).view(scales.dtype)
            entries = torch.stack([spread(scales), spread(offsets)], -1).view(blocks, self.groups, outputs, 2)
        return words.transpose(0, 1).contiguous(), entries.contiguous()


@frozen(kw_only=True)
class CodeLayout:
    """How a matrix of 8-bit codes is laid out."""

    dtype: str
    """Of codes: float8_e4m3fn or int8."""
    scale_rows: int = 0
    """Outputs that share a scale with the inputs of a block; 0: each output has one scale."""
    bits: ClassVar[int] = 8
    span: ClassVar[int] = 64
    block: ClassVar[int] = 128
    group: ClassVar[int] = 128
    groups: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"{self.dtype}, a scale {f'a block of {self.scale_rows} outputs' if self.scale_rows else 'an output'}"

    @property
    def code(self) -> str:
        """What a field is."""
        return "signed" if self.dtype == "int8" else "float8"

    @property
    def scaled(self) -> str:
        """What has a scale."""
        return "blocks" if self.scale_rows else "outputs"

    def power(self, dtype: torch.dtype) -> int:
        """As of a Layout."""
        return 1024 if dtype == torch.float16 and self.code == "signed" else 0

    def has_zeros(self, scales: torch.Tensor) -> bool:
        """As of a Layout."""
        return False

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """[outputs, inputs] -> [outputs, blocks * 128], of the same type."""
        outputs, inputs = codes.shape
        blocks = -(-inputs // self.block)
        padded = F.pad(codes.view(torch.uint8), (0, blocks * self.block - inputs))
        return padded.view(outputs, blocks, 2, self.span).transpose(2, 3).reshape(outputs, -1).view(codes.dtype)

    def unpack(self, packed: torch.Tensor, inputs: int) -> torch.Tensor:
        """The other way."""
        fields = packed.view(torch.uint8).view(packed.shape[0], packed.shape[1] // self.block, self.span, 2)
        return fields.transpose(2, 3).reshape(packed.shape)[:, :inputs].contiguous().view(packed.dtype)

    def words(self, packed: torch.Tensor) -> torch.Tensor:
        """The same memory as [blocks, outputs, span] int16."""
        return packed.view(torch.int16).view(packed.shape[0], -1, self.span).transpose(0, 1)


@frozen(kw_only=True, eq=False)
class PackedMatrix:
    """A weight matrix W, [rows, inputs], as its layout has it and kernels read it."""

    words: torch.Tensor
    scales: torch.Tensor
    layout: Layout | CodeLayout

    @property
    def rows(self) -> int:
        """Of W."""
        return self.words.shape[1]

    @property
    def zeros(self) -> bool:
        """Whether there are zero points."""
        return self.layout.has_zeros(self.scales)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What is in memory, by name."""
        return {"words": self.words, "scales": self.scales}
