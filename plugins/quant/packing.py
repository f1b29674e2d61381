"""How checkpoints pack whole numbers of 4 or 8 bits into int32 words, and what their zero points mean.

Read here, and nowhere else, into plain unsigned numbers, one a byte. Sources: AutoGPTQ and GPTQModel
(nn_modules/qlinear), AutoAWQ (modules/linear/gemm.py), compressed-tensors (compressors/pack_quantized).
"""

from __future__ import annotations

import torch

WORD = 32
"""Bits of a word."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ: nibble i of a word, from the low end, is column AWQ_ORDER[i] of its eight."""


def unpack(words: torch.Tensor, bits: int, dim: int, size: int) -> torch.Tensor:
    """words: int32, packed along `dim`, first number lowest -> uint8, `size` numbers along `dim`."""
    words = words.movedim(dim, -1)
    fields = [((words >> shift) & (2**bits - 1)).to(torch.uint8) for shift in range(0, WORD, bits)]
    numbers = torch.stack(fields, -1).flatten(-2)[..., :size]
    return numbers.movedim(-1, dim)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """words: [rows, columns / 8] int32 of AWQ's order -> [rows, columns] uint8."""
    numbers = torch.empty((*words.shape, len(AWQ_ORDER)), dtype=torch.uint8, device=words.device)
    for place, column in enumerate(AWQ_ORDER):
        numbers[..., column] = ((words >> (4 * place)) & 15).to(torch.uint8)
    return numbers.flatten(-2)


def gptq_zeros(words: torch.Tensor, bits: int, outputs: int, *, less_one: bool, symmetric: bool) -> torch.Tensor:
    """words: [groups, packed outputs] int32 -> zero points: [groups, outputs] uint8.

    less_one: stored less one (format "gptq"), modulo 2^bits. Some writers call "gptq" what is stored as it is; for a
    symmetric checkpoint this shows, since all its zero points are 2^(bits - 1), and it is read as it was meant.
    """
    zeros = unpack(words, bits, 1, outputs)
    half = 2 ** (bits - 1)
    if less_one and not (symmetric and bool((zeros == half).all())):
        zeros = (zeros + 1) & (2**bits - 1)  # modulo 256 where bits is 8: that is uint8's own
    return zeros
