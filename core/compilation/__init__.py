"""Compiles Triton kernels in other processes: a start records what it will launch, and finds the kernels on disk."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.compilation.client import SHARED as SHARED
    from engine.core.compilation.first_start import begin_first_start as begin_first_start
    from engine.core.compilation.head_start import (
        begin_compiler_key as begin_compiler_key,
        begin_driver as begin_driver,
    )
    from engine.core.compilation.recording import (
        CompilingElsewhere as CompilingElsewhere,
        record_launches as record_launches,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    client=("SHARED",),
    first_start=("begin_first_start",),
    head_start=("begin_compiler_key", "begin_driver"),
    recording=("CompilingElsewhere", "record_launches"),
)
