"""Ceilings: given or measured."""

from __future__ import annotations

import pytest

from engine.cli.bench.ceilings import copy_rate, find_ceilings, matmul_rate
from engine.core.device import DeviceInfo


def test_given_ceilings_are_not_measured() -> None:
    device = DeviceInfo(type="cpu")
    ceilings = find_ceilings(device, "float32", 32, 4.28, 814)
    assert (ceilings.bandwidth, ceilings.flops) == pytest.approx((4.28e12, 814e12))
    assert "as given" in ceilings.source


def test_ceilings_are_measured() -> None:
    # A byte of a small copy is read and written within the caches: far above a disk, below any machine there is.
    assert 1e8 < copy_rate("cpu", 2**20) < 1e14
    assert 1e7 < matmul_rate("cpu", "float32", 64) < 1e15
