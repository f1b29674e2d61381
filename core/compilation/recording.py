"""Records the kernels that are launched, and has a compile server compile them.

Triton offers triton.AsyncCompileMode: while one is active, a kernel that is not compiled is handed to `submit`, and the
answer takes the kernel's place until its first launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import triton
from triton.runtime._async_compile import FutureKernel, active_mode
from triton.runtime.jit import JITFunction

from engine.core.compilation.client import SHARED
from engine.core.compilation.job import Job

EMPTY = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))
"""PyTorch's functions that return uninitialized memory, by their place and name."""


class CompilingElsewhere(triton.AsyncCompileMode):  # type: ignore[misc]
    """Has the compile server compile the kernels of the `with` block, which waits for none.

    A kernel is waited for when it is first launched. One that the server could not compile is compiled then.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._compilations: dict[str, _Compilation] = {}

    def submit(self, key: str, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> FutureKernel:
        """Begin to compile a kernel. key: Triton's, of the kernel on disk."""
        if key not in self._compilations:
            self._compilations[key] = _Compilation(compile_kernel, self._submit(key, compile_kernel))
        kernel = FutureKernel(finalize, self._compilations[key])
        captured = inspect.getclosurevars(finalize).nonlocals
        with suppress(KeyError):  # another version's names
            captured["kernel_cache"][captured["key"]] = kernel  # Triton 3.6 does so only when the kernel is compiled
        return kernel

    def _submit(self, key: str, compile_kernel: Callable[[], Any]) -> Future[None] | None:
        """Send a kernel to the compile server. None: the kernel is on disk, or is to be compiled here."""
        with suppress(Exception):  # of a kernel that cannot be described
            job = Job.of(compile_kernel)
            encoded = job.encode()
            if not job.is_compiled(key) and (server := SHARED.begin()) is not None:
                return server.submit(encoded)
        return None

    def __exit__(self, *error: object) -> None:
        active_mode.set(None)


class _Compilation:
    """A kernel being compiled elsewhere. Its `result` is that of the Future that Triton expects."""

    def __init__(self, compile_kernel: Callable[[], Any], done: Future[None] | None) -> None:
        self._compile = compile_kernel
        self._done = done

    def result(self) -> Any:
        """Wait, and load the kernel from disk; compile it if it is not there."""
        if self._done is not None:
            self._done.result()
        return self._compile()


@contextmanager
def record_launches() -> Iterator[None]:
    """CompilingElsewhere, without launching: launches in the `with` block only record their kernels.

    The tensors that the kernels would have filled are zero, so that an operation of PyTorch that reads indices from
    them finds valid ones. For one thread at a time.
    """
    run = JITFunction.run

    def record(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with CompilingElsewhere(), ExitStack() as replaced:
        _replace(JITFunction, "run", record, replaced)
        for place, name in EMPTY:
            _replace(place, name, _zeroing(getattr(place, name)), replaced)
        yield


def _replace(place: Any, name: str, replacement: Any, until: ExitStack) -> None:
    """Set an attribute, and set it back when the stack unwinds."""
    until.callback(setattr, place, name, getattr(place, name))
    setattr(place, name, replacement)


def _zeroing(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: make(*args, **kwargs).zero_()
