"""Fixtures of the kernels, for the tests that multiply by them here."""

import pytest

from engine.plugins.quant import w8_gpu
from tests.ops.conftest import device, half, hopper, seeded

__all__ = ["device", "half", "hopper", "seeded"]


def w8a16_up_to(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize activations of more rows than that, whatever kernels the device has."""
    monkeypatch.setattr(w8_gpu, "W8A16_MAX_ROWS", rows)
    monkeypatch.setattr(w8_gpu, "W8A16_MAX_ROWS_WGMMA", rows)
