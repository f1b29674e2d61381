"""Packs the 4-bit weights of experts, matrix by matrix, for the grouped GEMM.

A block is 128 consecutive inputs. `values` [blocks, outputs, 32] int16: a word has four fields, and field j of word i
of a block is the block's input 32 * j + i. The last block is filled with zeros. `scales` [entries, outputs] int32.

- int4: field j is the unsigned integer in four bits from bit 4 * j on. There is an entry per group of inputs: the scale
  in 16 bits, and the zero point above.
- fp4 (E2M1): field j is two bits of exponent and one of fraction from bit FP4_FRACTIONS[j] on, and a sign, bit
  FP4_SIGNS[j]. bfloat16 has all of them 0, 3, 6 or -3 bits further left. There is an entry per block: byte j is that of
  field j, the exponent of bfloat16 that makes the field a weight, see `pack_fp4`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.ops.experts.weights import ExpertMatrix

FIELDS = 4
SPAN = 32
"""Words per block and output."""
BLOCK_INPUTS = FIELDS * SPAN
FP4_FRACTIONS = (6, 3, 0, 9)
FP4_SIGNS = (15, 12, 13, 14)
SYMMETRIC_ZERO = 8
MAX_FP4_SCALE = 128
"""The largest s of a scale 2^(s - 127) for which s + FP4_EXPONENT is an exponent of bfloat16."""
FP4_EXPONENT = 126
"""A field of kind fp4, read as bfloat16, is 2^126 times too small."""
FLOAT32_BIAS = 127
FLOAT32_FRACTION_BITS = 23


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales of kind int4, for activations of `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def pack_int4(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, dtype: torch.dtype
) -> ExpertMatrix:
    """Pack the weights (value - zero point) * scale.

    values: [outputs, inputs] uint8, 0 to 15. scales: [groups, outputs], a float dtype; zeros: the same in uint8, or
    None: all are 8. group: inputs that share a scale: 32, 64 or 128. dtype: of activations.
    """
    if zeros is None:
        zeros = torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.uint8)
    bits = scales.to(scale_dtype(dtype)).contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    entries = _of_whole_blocks(bits | zeros.to(torch.int32) << 16, values.shape[1], group)
    return ExpertMatrix(values=_words(values.to(torch.int32), range(0, 16, 4)), scales=entries)


def pack_fp4(values: torch.Tensor, scales: torch.Tensor) -> ExpertMatrix:
    """Pack E2M1 numbers with scales 2^(s - 127) per 32 inputs.

    values: [outputs, inputs] uint8, the bits of the numbers; scales: s, [groups, outputs] uint8. The exponent of a
    field is s + 126, less a number that makes the largest scale fit; the factor makes up for it. In a matrix with
    scales above 2, weights below 2^-131 of the largest scale may be rounded to 0. All others are exact.
    """
    excess = (scales.max().to(torch.int32) - MAX_FP4_SCALE).clamp(min=0)
    exponents = (scales.to(torch.int32) + FP4_EXPONENT - excess).clamp(min=0)
    by_block = _of_whole_blocks(exponents, values.shape[1], SPAN).view(-1, FIELDS, scales.shape[1])
    entries = by_block[:, 0] | by_block[:, 1] << 8 | by_block[:, 2] << 16 | by_block[:, 3] << 24
    values = values.to(torch.int32)
    words = _words(values & 7, FP4_FRACTIONS) | _words(values >> 3, FP4_SIGNS)
    factor = ((excess + FLOAT32_BIAS) << FLOAT32_FRACTION_BITS).view(torch.float32)
    return ExpertMatrix(values=words, scales=entries, factor=factor)


def _words(fields: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Fields [outputs, inputs] int32, each shifted left to its place -> [blocks, outputs, SPAN] int16."""
    outputs, inputs = fields.shape
    padded = F.pad(fields, (0, -inputs % BLOCK_INPUTS)).view(outputs, -1, FIELDS, SPAN)
    words = padded[:, :, 0] << places[0]
    for field, place in enumerate(places):
        words |= padded[:, :, field] << place
    # Two's complement by arithmetic: converting numbers out of int16's range is undefined.
    return (words - ((words & 0x8000) << 1)).to(torch.int16).transpose(0, 1).contiguous()


def _of_whole_blocks(groups: torch.Tensor, inputs: int, group: int) -> torch.Tensor:
    """Pad [groups, outputs] with zeros for the groups that the last block lacks."""
    wanted = -(-inputs // BLOCK_INPUTS) * BLOCK_INPUTS // group
    return F.pad(groups, (0, 0, 0, wanted - len(groups))).contiguous()
