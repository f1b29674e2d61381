"""Codes of keys and values, against the table of all of them."""

from __future__ import annotations

import pytest
import torch

from engine.core.quant.float8 import LARGEST, KVScales, encode

TABLE = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()


def test_a_code_is_the_nearest_there_is() -> None:
    torch.manual_seed(0)
    numbers = torch.cat([torch.randn(2000) * size for size in (1e-4, 0.01, 1.0, 30.0)])
    codes = encode(numbers, 0.25).double()
    nearest = (TABLE[TABLE.isfinite()][None] - numbers.double()[:, None] / 0.25).abs().amin(1)
    assert torch.equal((codes - numbers.double() / 0.25).abs(), nearest)


@pytest.mark.parametrize("scale", [1.0, 0.375, 0.013])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_beyond_the_largest_is_cut_off(scale: float, dtype: torch.dtype) -> None:
    numbers = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 470 * scale, -900 * scale], dtype=dtype)
    assert encode(numbers, scale).tolist() == [LARGEST, -LARGEST] * 3


def test_no_number_stays_none() -> None:
    assert encode(torch.tensor([torch.nan, 0.0]), 2.0).float().isnan().tolist() == [True, False]


def test_every_code_comes_back_as_itself() -> None:
    codes = TABLE[TABLE.isfinite()]
    for scale in (1.0, 0.75, 2**-7):
        assert torch.equal(encode((codes * scale).float(), scale).double(), codes)


def test_scales_are_1_where_nothing_is_said() -> None:
    assert KVScales() == KVScales(key=1.0, value=1.0)
