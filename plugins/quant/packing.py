"""Unpacks integers of 4 or 8 bits from the checkpoints' int32 words, and corrects their zero points.

Results are plain unsigned integers, one per byte. Sources: AutoGPTQ and GPTQModel (nn_modules/qlinear), AutoAWQ
(modules/linear/gemm.py), compressed-tensors (compressors/pack_quantized).
"""

from __future__ import annotations

import torch

WORD = 32
"""Bits per packed word."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ: nibble i of a word, from the low end, is column AWQ_ORDER[i] of the word's eight."""


def unpack(packed: torch.Tensor, bits: int, dim: int, size: int) -> torch.Tensor:
    """packed: int32, packed along `dim`, lowest field first -> uint8, `size` numbers along `dim`."""
    packed = packed.movedim(dim, -1)
    fields = [((packed >> shift) & (2**bits - 1)).to(torch.uint8) for shift in range(0, WORD, bits)]
    numbers = torch.stack(fields, -1).flatten(-2)[..., :size]
    return numbers.movedim(-1, dim)


def unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    """packed: [rows, columns / 8] int32 in AWQ_ORDER -> [rows, columns] uint8."""
    numbers = torch.empty((*packed.shape, len(AWQ_ORDER)), dtype=torch.uint8, device=packed.device)
    for place, column in enumerate(AWQ_ORDER):
        numbers[..., column] = ((packed >> (4 * place)) & 15).to(torch.uint8)
    return numbers.flatten(-2)


def gptq_zeros(packed: torch.Tensor, bits: int, outputs: int, *, less_one: bool, symmetric: bool) -> torch.Tensor:
    """packed: [groups, packed outputs] int32 -> zero points: [groups, outputs] uint8.

    less_one: the format ("gptq") stores zero points minus one, modulo 2^bits. Some writers label zero points stored as
    they are "gptq" too. In a symmetric checkpoint this is detectable, since all zero points are 2^(bits - 1).
    """
    zeros = unpack(packed, bits, 1, outputs)
    half = 2 ** (bits - 1)
    if less_one and not (symmetric and bool((zeros == half).all())):
        zeros = (zeros + 1) & (2**bits - 1)  # modulo 256 where bits is 8: that is uint8's own
    return zeros
