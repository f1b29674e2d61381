"""Compiles Triton kernels in threads, as most of the compiler runs outside Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from engine.core.host import Host

MAX_THREADS = 16
EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
"""PyTorch's functions that return memory as it is."""


@contextmanager
def compiling_in_threads() -> Iterator[None]:
    """Have kernels that are compiled inside compiled side by side; on exit all are.

    A kernel that fails to compile fails again when it is launched.
    """
    with (
        ThreadPoolExecutor(min(Host().cores(), MAX_THREADS)) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
    ):
        yield


@contextmanager
def compiling_only() -> Iterator[None]:
    """Have launches inside compile their kernels in threads, and launch nothing.

    A launch waits for its own kernel to be compiled; here the launches that follow do not wait. The tensors that the
    kernels would have filled are zero, so that an operation of PyTorch that reads indices from them finds valid ones.
    """
    run = JITFunction.run

    def compile_kernel(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with compiling_in_threads(), _EmptyIsZero():
        JITFunction.run = compile_kernel
        try:
            yield
        finally:
            JITFunction.run = run


class _EmptyIsZero(TorchFunctionMode):
    """Has the functions of EMPTY return zeros."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in EMPTY else made
