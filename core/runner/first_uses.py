"""Counts what a step compiles or captures because the start did not: it delays every request in the batch."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from engine.core.runner.cuda_graphs import DecodeGraphs

log = logging.getLogger(__name__)


@frozen
class FirstUse:
    """Kernels and graphs that one step had to compile, load or capture."""

    kernels: int = 0
    """Triton kernels compiled, or loaded from the kernel cache on disk."""
    graphs: int = 0
    """CUDA graphs captured."""


NOTHING = FirstUse()


class FirstUses:
    """Counts kernels compiled and CUDA graphs captured since the last `take`."""

    def __init__(self, *, counts_kernels: bool, decode_graphs: DecodeGraphs | None) -> None:
        """counts_kernels: whether Triton's kernels are counted; only a GPU compiles any."""
        self._kernels = _compiled_kernels() if counts_kernels else []
        self._decode_graphs = decode_graphs
        self._num_kernels, self._num_graphs = len(self._kernels), self._captured()

    def take(self) -> FirstUse:
        """The kernels and graphs since the last call."""
        num_kernels, num_graphs = len(self._kernels), self._captured()
        if num_kernels == self._num_kernels and num_graphs == self._num_graphs:
            return NOTHING
        found = FirstUse(num_kernels - self._num_kernels, num_graphs - self._num_graphs)
        log.info(
            "a step captured %d CUDA graphs and compiled or loaded %d kernels: %s",
            found.graphs,
            found.kernels,
            ", ".join(self._kernels[self._num_kernels :]) or "no kernel",
        )
        self._num_kernels, self._num_graphs = num_kernels, num_graphs
        return found

    def _captured(self) -> int:
        return 0 if self._decode_graphs is None else self._decode_graphs.num_captured


@cache
def _compiled_kernels() -> list[str]:
    """The names of all kernels that Triton has compiled or loaded in this process since the first call; grows."""
    from triton import knobs

    names: list[str] = []
    other = knobs.runtime.jit_post_compile_hook

    def note(**compiled: Any) -> Any:
        names.append(compiled["repr"].partition("[")[0])
        return other(**compiled) if other is not None else None

    knobs.runtime.jit_post_compile_hook = note
    return names
