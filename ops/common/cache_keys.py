"""Makes Triton's cache on disk find a kernel whatever was compiled before it in the process.

The key of a kernel covers the constants (tl.constexpr at the top of a module) that it and the functions it calls read.
Computing a called function's own key records that function's constants, but Triton reads the record before it computes
that key (DependenciesFinder._update_hash in triton/runtime/jit.py; seen in 3.6.0 and 3.7.1). A called function's
constants therefore count only if its key happens to be known, so that a kernel's key depends on which kernels ran
before. A start that measures kernels runs them in another order than the next start, which compiled 22 of 57 kernels
again.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import DependenciesFinder


def make_cache_keys_independent_of_order() -> None:
    """Have Triton compute the key of a called function before it reads the constants recorded with it.

    Does nothing with a version of Triton that combines keys elsewhere, or when called again.
    """
    update = getattr(DependenciesFinder, "_update_hash", None)
    if update is None or getattr(update, "computes_keys_first", False):
        return

    def update_hash(self: DependenciesFinder, func: Any) -> None:
        getattr(func, "cache_key", None)  # computed, and recorded with the constants, on first access
        update(self, func)

    update_hash.computes_keys_first = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = update_hash
