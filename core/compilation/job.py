"""A compile job: one specialization of a Triton kernel, which another process can compile."""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
from collections.abc import Callable, Mapping
from functools import cache, reduce
from hashlib import sha256
from typing import Any

import triton
from attrs import frozen
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITCallable

FUNCTION_LOCAL = "<locals>"
"""Part of the qualified name of whatever a function defines; no other process can import that."""
MAX_NAME = 150
"""Characters of a kernel's name in the name of its file."""
SIZE_BYTES = 4
"""Bytes of the size (source_size) at the beginning of an encoded job."""


MakeLauncher = Callable[[Any, Any], object]
"""Makes what launches a kernel, from its source and its metadata: a driver's `launcher_cls`."""


@frozen
class Job:
    """The arguments of one call of triton.compile."""

    source: Any
    target: Any
    options: Mapping[str, Any]

    @classmethod
    def of(cls, compile_kernel: Callable[[], object]) -> Job:
        """The job of the function that Triton passes to triton.AsyncCompileMode, from the variables it captures."""
        captured = inspect.getclosurevars(compile_kernel).nonlocals
        return cls(captured["src"], captured["target"], captured["options"].__dict__)

    def is_compiled(self, key: str) -> bool:
        """Whether the kernel is on disk, under the key that Triton computes."""
        manager = get_cache_manager(sha256(key.encode()).hexdigest())
        return manager.get_group(f"{self.source.name[:MAX_NAME]}.json") is not None

    def encode(self) -> bytes:
        """The job as bytes, the first of which are its size. Raises PicklingError for a kernel that no other process
        can import."""
        file = io.BytesIO()
        file.write(source_size(self.source.fn).to_bytes(SIZE_BYTES))
        _Pickler(file).dump((self.source, self.target, self.options))
        return file.getvalue()

    @classmethod
    def decode(cls, encoded: bytes) -> Job:
        """The job of `encode`; imports its kernel."""
        return cls(*_Unpickler(io.BytesIO(encoded[SIZE_BYTES:])).load())

    def run(self, make_launcher: MakeLauncher | None) -> None:
        """Compile the kernel, and what launches it, into Triton's cache on disk.

        The cache's keys depend on the kernel's source, its specialization, the options and the compiler alone.
        make_launcher: up to Triton 3.6 it runs a C compiler. None: there is no driver.
        """
        kernel = triton.compile(self.source, target=self.target, options=self.options)
        if make_launcher is not None:
            make_launcher(self.source, kernel.metadata)


@cache
def source_size(kernel: JITCallable) -> int:
    """Characters of a kernel and of the functions it calls: the more, the longer it most likely takes to compile."""
    found, new = {kernel}, [kernel]
    while new:
        function = new.pop().fn
        called = {function.__globals__.get(name) for name in function.__code__.co_names}
        new += [one for one in called if isinstance(one, JITCallable) and one not in found]
        found.update(new)
    return sum(len(one.src) for one in found)


class _Pickler(pickle.Pickler):
    """Writes a kernel, or a function that kernels call, by its name."""

    def persistent_id(self, value: Any) -> tuple[str, str] | None:
        if not isinstance(value, JITCallable):
            return None
        name = value.fn.__qualname__
        if value.__module__ == "__main__" or FUNCTION_LOCAL in name:
            raise pickle.PicklingError(f"{name} of {value.__module__} cannot be imported")
        return value.__module__, name


class _Unpickler(pickle.Unpickler):
    """Reads what _Pickler writes."""

    def persistent_load(self, name: tuple[str, str]) -> Any:
        module, qualified_name = name
        found = reduce(getattr, qualified_name.split("."), importlib.import_module(module))
        while not isinstance(found, JITCallable):
            found = found.fn  # of a triton.heuristics or triton.autotune around the kernel
        return found
