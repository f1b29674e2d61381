"""A speculator that a test scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from engine.core.speculators import SpeculatedSequence, Speculator


class Told(Speculator):
    """Proposes the outputs that a test has given by `tell`, by prompt, with no, some or all tokens wrong."""

    api = "1"
    outputs: ClassVar[dict[tuple[int, ...], Sequence[int]]] = {}
    wrong_every: ClassVar[int] = 0
    """Every how many tokens one is wrong; 0: none is."""

    @classmethod
    def tell(cls, outputs: Mapping[tuple[int, ...], Sequence[int]], wrong_every: int = 0) -> None:
        """Propose these outputs from now on."""
        cls.outputs = dict(outputs)
        cls.wrong_every = wrong_every

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        length = sequence.prompt_length
        output = self.outputs.get(tuple(sequence.tokens[:length]), ())
        first = len(sequence.tokens) - length
        drafts = enumerate(output[first : first + limit], first)
        return [(token + 1) % 256 if self.wrong_every and not at % self.wrong_every else token for at, token in drafts]
