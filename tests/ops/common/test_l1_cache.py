"""Kernels that prefer the L1 cache to shared memory."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from engine.ops.common import l1_cache
from engine.ops.common.cuda_driver import open_driver


@triton.jit
def copy_one_kernel(out, x):
    tl.store(out, tl.load(x))


def test_only_the_kernels_named_get_the_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    class Driver:
        def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802 the driver's name
            found.append((function.value, attribute, value))
            return 0

    monkeypatch.setattr(l1_cache, "_names", set())
    monkeypatch.setattr(l1_cache, "_driver", Driver)
    kernel: Any = copy_one_kernel
    l1_cache.prefer_l1_cache(kernel)
    l1_cache.prefer_l1_cache(kernel)
    for function, name in ((7, "copy_one_kernel"), (8, "another_kernel")):
        knobs.runtime.kernel_load_end_hook(None, function, name, {}, "hash")
    assert found == [(7, 9, 14)]


@pytest.mark.gpu
def test_the_driver_keeps_the_preference(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = copy_one_kernel
    l1_cache.prefer_l1_cache(kernel)
    x = torch.ones(2, device=hopper)
    compiled = kernel[(1,)](x, x[1:])
    value = ctypes.c_int()
    driver = open_driver()
    assert driver.cuFuncGetAttribute(ctypes.byref(value), 9, ctypes.c_void_p(compiled.function)) == 0
    assert value.value == 14
