"""Golden words of the formats, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.plugins.quant.packing import gptq_zeros, unpack, unpack_awq


def word(value: Any) -> Any:
    return value - 2**32 if value >= 2**31 else value


def test_unpack_starts_at_the_low_end_of_a_word() -> None:
    words = torch.tensor([[word(0x76543210)], [word(0xFEDCBA98)]], dtype=torch.int32)
    assert unpack(words.T, 4, 1, 16).tolist() == [list(range(16))]
    assert unpack(words, 4, 0, 16).T.tolist() == [list(range(16))]
    assert unpack(words, 4, 0, 13).T.tolist() == [list(range(13))]
    assert unpack(torch.tensor([[word(0xFF7F0180)]], dtype=torch.int32), 8, 1, 4).tolist() == [[128, 1, 127, 255]]


def test_unpack_awq_restores_the_order() -> None:
    words = torch.tensor([[word(0x75316420), word(0xFDB9ECA8)]], dtype=torch.int32)
    assert unpack_awq(words).tolist() == [list(range(16))]


@pytest.mark.parametrize(
    ("value", "bits", "less_one", "symmetric", "zero"),
    [
        (0x77777777, 4, True, True, 8),
        (0x77777777, 4, True, False, 8),
        (0x88888888, 4, False, True, 8),
        (0x88888888, 4, True, True, 8),  # called "gptq", stored as "gptq_v2"
        (0x88888888, 4, True, False, 9),
        (0xFFFFFFFF, 4, True, False, 0),
        (0xFFFFFFFF, 4, False, False, 15),
        (0x7F7F7F7F, 8, True, True, 128),
        (0x80808080, 8, False, True, 128),
        (0x80808080, 8, True, True, 128),
        (0xFFFFFFFF, 8, True, False, 0),
    ],
)
def test_gptq_zeros_reads_both_versions(value: int, bits: int, less_one: bool, symmetric: bool, zero: int) -> None:
    words = torch.tensor([[word(value)] * 2], dtype=torch.int32)
    outputs = 64 // bits
    zeros = gptq_zeros(words, bits, outputs, less_one=less_one, symmetric=symmetric)
    assert zeros.tolist() == [[zero] * outputs]
