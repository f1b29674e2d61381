"""Memory layouts of the 4-bit and 8-bit weights that ops/gemm/weight_only.py multiplies, whatever the checkpoint's.

`packed` [blocks, outputs, span] int16: words with 16 / bits fields each, one field per weight. A block is fields * span
consecutive inputs. Field j (from the low end) of word i of a block is the block's input j * span + i. Blocks are padded
with zeros, which are multiplied by zeros.

GroupedLayout (W4A16, W8A16): unsigned integers of 4 or 8 bits, scales per group of inputs. An output's words of one
block precede the next output's. `scales` [blocks, entries, outputs, 2], in the scales' dtype. Without zero points an
entry is the scales of two groups. With zero points it is the scale of one group and the bits of its offset: a number of
the activations' dtype which, added to a field read as `power` + q, leaves q - zero point.

W8Layout (W8A8, W8A16): float8 or int8, scales per output or per block of the matrix. All words of an output precede the
next output's, so that the same memory is a row-major matrix of quantized values for the W8A8 kernels. Its inputs are
permuted within each block of 128, and the quantized activations must be permuted in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from attrs import frozen

ValueType = Literal["unsigned", "signed", "float8"]
"""What a field holds: an unsigned integer, an int8, or a float8 (e4m3)."""
ScaleLayout = Literal["groups", "outputs", "blocks"]
"""What shares a scale: a group of an output's inputs, all inputs of an output, or a block of outputs x inputs."""

SPANS = (64, 32)
"""Consecutive inputs of one field. A larger span needs less index arithmetic."""


@frozen(kw_only=True)
class GroupedLayout:
    """Layout of unsigned integers with scales per group of inputs."""

    bits: int
    span: int
    group: int
    """Inputs that share a scale. A larger group of the checkpoint becomes several with equal scales."""
    value_type: ClassVar[ValueType] = "unsigned"
    scale_layout: ClassVar[ScaleLayout] = "groups"
    scale_rows: ClassVar[int] = 0

    def __str__(self) -> str:
        return f"{self.bits} bits, groups of {self.group}"

    @classmethod
    def choose(cls, bits: int, group_size: int) -> GroupedLayout:
        """The layout for groups of this many inputs (-1: all inputs). Raises ValueError where none fits."""
        for span in SPANS:
            block = 16 // bits * span
            for group in (block // 2, block // 4):  # two or four groups per block: 32 or 64 bits of scales
                if group >= span and (group_size == -1 or group_size % group == 0):
                    return cls(bits=bits, span=span, group=group)
        raise ValueError(
            f"the checkpoint's weights have groups of {group_size} inputs; use one with groups of a multiple of"
            f" {SPANS[-1]}, or a scale per channel (-1)"
        )

    @property
    def fields(self) -> int:
        """Fields per word."""
        return 16 // self.bits

    @property
    def block(self) -> int:
        """Inputs per block."""
        return self.fields * self.span

    @property
    def groups(self) -> int:
        """Groups per block."""
        return self.block // self.group

    def power(self, dtype: torch.dtype) -> int:
        """The number that reading adds to a field, for activations of a dtype: see ops/gemm/unpack_weights.py."""
        if dtype == torch.float16:
            return 1024
        return 128 if self.bits == 4 else 0

    def has_zeros(self, scales: torch.Tensor) -> bool:
        """Whether scales from `pack` include zero points."""
        return scales.shape[1] == self.groups

    def pack(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        group_size: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack a weight matrix. Returns `packed` and `scales` as the module describes them.

        values: [outputs, inputs] uint8. scales: [groups, outputs] float16 or bfloat16, one per `group_size` consecutive
        inputs (-1: all). zeros: zero points, [groups, outputs] uint8; None: all are 2^(bits - 1). dtype: of
        activations.
        """
        outputs, inputs = values.shape
        blocks = -(-inputs // self.block)
        padded = F.pad(values, (0, blocks * self.block - inputs))
        fields = padded.view(outputs, blocks, self.fields, self.span)
        packed = fields[:, :, 0].to(torch.int32)
        for field in range(1, self.fields):
            packed |= fields[:, :, field].to(torch.int32) << (self.bits * field)
        # Two's complement by arithmetic: converting numbers out of int16's range is undefined.
        packed = (packed - ((packed & 0x8000) << 1)).to(torch.int16)
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
        # Not contiguous(): it keeps the strides of a transposed view with one output, which cannot be viewed as words.
        return packed.transpose(0, 1).contiguous(), entries.clone(memory_format=torch.contiguous_format)


@frozen(kw_only=True)
class W8Layout:
    """Layout of float8 or int8 values with scales per output or per block."""

    dtype: Literal["float8_e4m3fn", "int8"]
    scale_rows: int = 0
    """Outputs that share a scale with a block of 128 inputs. 0: scales per output."""
    bits: ClassVar[int] = 8
    span: ClassVar[int] = 64
    block: ClassVar[int] = 128
    group: ClassVar[int] = 128
    groups: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"{self.dtype}, a scale per {f'block of {self.scale_rows} outputs' if self.scale_rows else 'output'}"

    @property
    def value_type(self) -> ValueType:
        """What a field holds."""
        return "signed" if self.dtype == "int8" else "float8"

    @property
    def scale_layout(self) -> ScaleLayout:
        """What shares a scale."""
        return "blocks" if self.scale_rows else "outputs"

    def power(self, dtype: torch.dtype) -> int:
        """As GroupedLayout.power."""
        return 1024 if dtype == torch.float16 and self.value_type == "signed" else 0

    def has_zeros(self, scales: torch.Tensor) -> bool:
        """False: the values are symmetric."""
        return False

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Pad and permute the inputs: [outputs, inputs] -> [outputs, blocks * 128], of the same dtype."""
        outputs, inputs = values.shape
        blocks = -(-inputs // self.block)
        padded = F.pad(values.view(torch.uint8), (0, blocks * self.block - inputs))
        return padded.view(outputs, blocks, 2, self.span).transpose(2, 3).reshape(outputs, -1).view(values.dtype)

    def unpack(self, matrix: torch.Tensor, inputs: int) -> torch.Tensor:
        """The inverse of `pack`: [outputs, blocks * 128] -> [outputs, inputs]."""
        fields = matrix.view(torch.uint8).view(matrix.shape[0], matrix.shape[1] // self.block, self.span, 2)
        return fields.transpose(2, 3).reshape(matrix.shape)[:, :inputs].contiguous().view(matrix.dtype)

    def as_words(self, matrix: torch.Tensor) -> torch.Tensor:
        """A view of a matrix from `pack` as words: [blocks, outputs, span] int16."""
        return matrix.view(torch.int16).view(matrix.shape[0], -1, self.span).transpose(0, 1)


WeightLayout = GroupedLayout | W8Layout


@frozen(kw_only=True, eq=False)
class PackedMatrix:
    """A weight matrix W, [rows, inputs], in its layout."""

    packed: torch.Tensor
    scales: torch.Tensor
    layout: WeightLayout

    @property
    def rows(self) -> int:
        """Rows of W."""
        return self.packed.shape[1]

    @property
    def zeros(self) -> bool:
        """Whether there are zero points."""
        return self.layout.has_zeros(self.scales)

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors, by the names of the attributes."""
        return {"packed": self.packed, "scales": self.scales}
