"""Compiles Triton kernels in other processes: a start records what it will launch, and finds the kernels on disk."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.compilation.first_start import begin_first_start as begin_first_start

__getattr__, __dir__, __all__ = exports(__name__, first_start=("begin_first_start",))
