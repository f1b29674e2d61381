"""Begins in threads what a start on a GPU would wait for later, while this process imports and chooses plugins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from engine.core.compilation.first_start import may_use_gpu

if TYPE_CHECKING:
    from engine.core.config.tree import EngineConfig

MODULE_LOADING = "CUDA_MODULE_LOADING"


def begin_driver(config: EngineConfig) -> threading.Thread | None:
    """Begin to initialize the GPU's driver in a thread, which takes 0.1 s or more. Call it before torch is imported.

    Takes no memory of a GPU. From now on CUDA_VISIBLE_DEVICES has no effect, and a forked process cannot use the GPU.
    Returns the thread, which nothing needs to wait for: a later call of the driver waits until it is initialized.
    """
    if not may_use_gpu(config):
        return None
    os.environ.setdefault(MODULE_LOADING, "LAZY")  # as torch, which sets it before it initializes the driver
    return _begin("driver", _initialize_driver)


def begin_compiler_key(config: EngineConfig) -> threading.Thread | None:
    """Begin to compute in a thread the digest of the compiler that begins all keys of Triton's cache: 0.3 s or more.

    Call it once torch is imported. Triton computes the digest when it is first needed, and remembers it. Reading and
    hashing the compiler's files leaves the GIL to other threads.
    """
    return _begin("triton-key", _compute_key) if may_use_gpu(config) else None


def _begin(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _initialize_driver() -> None:
    from engine.ops.common.cuda_driver import open_driver

    with suppress(OSError, AttributeError):  # another vendor's GPU
        open_driver().cuInit(0)


def _compute_key() -> None:
    from triton.runtime.cache import triton_key

    triton_key()
