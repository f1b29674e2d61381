"""Names of tensors and modules in older checkpoints, which begin with a former prefix."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from engine.core.quant.base import LinearKernel
from engine.core.quant.experts import ExpertsKernel

SpecT = TypeVar("SpecT")
KernelT = TypeVar("KernelT", LinearKernel, ExpertsKernel)


class FormerPrefixes:
    """Which former prefixes a checkpoint has, and its names with them. A name is a tensor's or a module's."""

    def __init__(self, former: Mapping[str, str], stored: Collection[str]) -> None:
        """former: prefix -> former prefix, each with a dot at its end. stored: names of the checkpoint's tensors; a
        former prefix counts if some have it and none has the present one."""

        def has(prefix: str) -> bool:
            return any(name.startswith(prefix) for name in stored)

        self._in_use = {prefix: old for prefix, old in former.items() if has(old) and not has(prefix)}

    def stored(self, name: str) -> str:
        """The name in the checkpoint."""
        return _replace(name, self._in_use.items())

    def present(self, stored: str) -> str:
        """The name by which models ask for what the checkpoint has as `stored`."""
        return _replace(stored, ((old, prefix) for prefix, old in self._in_use.items()))


def best_answer(
    specs: Sequence[SpecT], ask: Callable[[SpecT], KernelT | None], has_tensors: Callable[[SpecT, KernelT], bool]
) -> tuple[SpecT, KernelT | None]:
    """Ask a quantization method for the kernel of one layer. Returns the kernel, None if the layer is not quantized,
    and the spec of the answer.

    The lists of a quantization_config may have the names of the checkpoint's tensors, or those that the model had in
    memory when it was quantized. The tensors decide: the first kernel is right whose tensors the checkpoint has; if
    there is none, the answer that the layer is not quantized.

    specs: of the layer, by each of its names. has_tensors: whether the checkpoint has the tensors of a kernel.
    """
    answers: list[tuple[SpecT, KernelT | None]] = []
    for spec in specs:
        kernel = ask(spec)
        if len(specs) == 1 or (kernel is not None and has_tensors(spec, kernel)):
            return spec, kernel
        answers.append((spec, kernel))
    return next((answer for answer in answers if answer[1] is None), answers[0])


def _replace(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    """The name with the first of the prefixes that it has replaced. prefixes: (prefix, replacement)."""
    dotted = f"{name}."  # a module can be all that a prefix names
    for prefix, replacement in prefixes:
        if dotted.startswith(prefix):
            return (replacement + dotted.removeprefix(prefix)).removesuffix(".")
    return name
