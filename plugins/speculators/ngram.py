"""Proposes what followed the last tokens of a sequence at an earlier occurrence, in its prompt or its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from engine.core.speculators import SpeculatedSequence, Speculator, SpeculatorSpec
from engine.plugins.speculators.ngram_index import MAX_N, NgramIndex


@frozen(kw_only=True)
class NgramOptions:
    """Options of ngram, [speculator.options]."""

    min_n: int = field(default=2)
    """Minimum number of last tokens that must have occurred before. More: fewer proposals, more of them accepted."""
    max_n: int = field(default=4)
    """Number of last tokens that are looked up first; then half as many, and so on down to min_n."""
    context: int = field(default=32768)
    """Minimum number of last tokens of a sequence that are indexed. Memory, with the default min_n and max_n: at most
    72 bytes per token if this is a power of two, else up to 136."""

    @min_n.validator
    @max_n.validator
    def _check_n(self, attribute: Any, value: int) -> None:
        if not 1 <= value <= MAX_N:
            raise ValueError(f"{attribute.name} is {value}; give a number from 1 to {MAX_N}")

    @context.validator
    def _check_context(self, _: Any, value: int) -> None:
        if not 64 <= value <= 2**22:
            raise ValueError(f"context is {value}; give a number from 64 to {2**22}")

    def __attrs_post_init__(self) -> None:
        if self.min_n > self.max_n:
            raise ValueError(f"min_n is {self.min_n}, above max_n, which is {self.max_n}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of last tokens that are looked up, the largest first."""
        sizes = [self.max_n]
        while sizes[-1] // 2 > self.min_n:
            sizes.append(sizes[-1] // 2)
        return (*sizes, self.min_n) if sizes[-1] > self.min_n else tuple(sizes)


class Ngram(Speculator[NgramOptions]):
    """Keeps an index of each sequence. The time per token does not depend on the length of the sequence."""

    api = "1"
    options_class = NgramOptions

    def __init__(self, spec: SpeculatorSpec, options: NgramOptions) -> None:
        super().__init__(spec, options)
        self._sizes = options.sizes
        self._indices: dict[str, NgramIndex] = {}

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        index = self._indices.get(sequence.request_id)
        if index is None:
            index = self._indices[sequence.request_id] = NgramIndex(self._sizes, context=self.options.context)
        index.extend(sequence.tokens)
        return index.continuation(limit)

    def finished(self, request_id: str) -> None:
        self._indices.pop(request_id, None)
