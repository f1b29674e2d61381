"""Float8 quantization of keys and values, against the table of all float8 values."""

from __future__ import annotations

import pytest
import torch

from engine.core.device import DeviceInfo
from engine.core.quant.float8 import FLOAT8, FLOAT8_MAX, KVScales, has_float8, quantize_float8

TABLE = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()


def test_float8_max_is_the_largest_finite_float8() -> None:
    assert TABLE[TABLE.isfinite()].max() == torch.finfo(getattr(torch, FLOAT8)).max == FLOAT8_MAX


@pytest.mark.parametrize(("capability", "expected"), [(None, False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_has_float8_from_capability_8_9_on(capability: tuple[int, int] | None, expected: bool) -> None:
    assert has_float8(DeviceInfo(type="cuda", capability=capability)) is expected


def test_quantize_float8_rounds_to_the_nearest_value() -> None:
    torch.manual_seed(0)
    numbers = torch.cat([torch.randn(2000) * size for size in (1e-4, 0.01, 1.0, 30.0)])
    quantized = quantize_float8(numbers, 0.25).double()
    nearest = (TABLE[TABLE.isfinite()][None] - numbers.double()[:, None] / 0.25).abs().amin(1)
    assert torch.equal((quantized - numbers.double() / 0.25).abs(), nearest)


@pytest.mark.parametrize("scale", [1.0, 0.375, 0.013])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_float8_saturates(scale: float, dtype: torch.dtype) -> None:
    numbers = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, 470 * scale, -900 * scale], dtype=dtype)
    assert quantize_float8(numbers, scale).tolist() == [FLOAT8_MAX, -FLOAT8_MAX] * 3


def test_quantize_float8_keeps_nan() -> None:
    assert quantize_float8(torch.tensor([torch.nan, 0.0]), 2.0).float().isnan().tolist() == [True, False]


def test_quantize_float8_inverts_dequantization() -> None:
    values = TABLE[TABLE.isfinite()]
    for scale in (1.0, 0.75, 2**-7):
        assert torch.equal(quantize_float8((values * scale).float(), scale).double(), values)


def test_kv_scales_default_to_1() -> None:
    assert KVScales() == KVScales(key=1.0, value=1.0)
