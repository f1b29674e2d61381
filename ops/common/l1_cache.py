"""A large L1 cache for kernels whose programs read the same inputs.

The L1 cache and the shared memory of a multiprocessor are one memory. By default the driver leaves the division that
the preceding kernel had if the shared memory of a kernel fits, so that the L1 cache is small behind kernels with much
shared memory, such as attention. Source: CUDA driver API, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from triton import knobs
from triton.runtime.jit import JITFunction

from engine.ops.common.cuda_driver import open_driver

PREFERRED_SHARED_MEMORY = 9
"""The attribute's number in CUfunction_attribute of cuda.h."""
SHARED_PERCENT = 14
"""Shared memory, percent of the largest possible: 32 of 228 KiB on Hopper."""

_names: set[str] = set()


def prefer_l1_cache(kernel: JITFunction[Any]) -> None:
    """Ask for a large L1 cache in all variants of a kernel loaded from now on, on CUDA GPUs.

    All its programs on a multiprocessor together need at most SHARED_PERCENT of shared memory. No other kernel has its
    name, which is all that Triton passes on.
    """
    _names.add(kernel.__name__)
    knobs.runtime.kernel_load_end_hook.add(_after_load)


def _after_load(module: object, function: int, name: str, *others: object) -> None:
    """Called by Triton with the CUfunction of each kernel loaded."""
    if name in _names:
        _driver().cuFuncSetAttribute(ctypes.c_void_p(function), PREFERRED_SHARED_MEMORY, SHARED_PERCENT)


@cache
def _driver() -> ctypes.CDLL:
    return open_driver()
