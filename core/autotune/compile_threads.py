"""Compiles Triton kernels in threads, as most of the compiler runs outside Python."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from engine.core.host import Host

MAX_THREADS = 16


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

    The tensors that the kernels would have filled stay as they are, so whatever else runs inside must not depend on
    their values. A launch waits for its own kernel to be compiled; here the launches that follow do not wait.
    """
    run = JITFunction.run

    def compile_kernel(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with compiling_in_threads():
        JITFunction.run = compile_kernel
        try:
            yield
        finally:
            JITFunction.run = run
