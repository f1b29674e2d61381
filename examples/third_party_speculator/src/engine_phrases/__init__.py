"""Speculator `phrases`: once an output has the beginning of a known phrase, the rest of the phrase is proposed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from attrs import field, frozen, validators

from engine.core.errors import ConfigError
from engine.core.hooks import Register, hookimpl
from engine.core.speculators import SpeculatedSequence, Speculator, SpeculatorSpec


@hookimpl
def register_speculators(register: Register) -> None:
    """Register the speculator."""
    register("phrases", lambda: Phrases, api="2", summary="the rest of known phrases, from a file")


@frozen
class Options:
    """Options of phrases, [speculator.options]."""

    file: str
    """File of phrases: JSON, a list of lists of tokens."""
    beginning: int = field(default=4, validator=validators.ge(1))
    """Tokens of a phrase, anywhere in it, after which its rest is proposed."""


class Phrases(Speculator[Options]):
    """Looks up the last tokens in a table of all places in the phrases; of equal places, the first phrase's counts."""

    api = "2"
    options_class = Options

    def __init__(self, spec: SpeculatorSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.phrases: list[list[int]] = json.loads(Path(options.file).read_text(encoding="utf-8"))
        largest = max((token for phrase in self.phrases for token in phrase), default=0)
        if largest >= spec.vocab_size:
            raise ConfigError(
                f"{options.file} has token {largest}, but the vocabulary has {spec.vocab_size}; make it with this"
                " model's tokenizer"
            )
        self.places: dict[tuple[int, ...], tuple[int, int]] = {}
        for number, phrase in enumerate(self.phrases):
            for end in range(options.beginning, len(phrase)):
                self.places.setdefault(tuple(phrase[end - options.beginning : end]), (number, end))

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        """The rest of the phrase that the last tokens are in."""
        number, end = self.places.get(tuple(sequence.tokens[-self.options.beginning :]), (-1, 0))
        return self.phrases[number][end : end + limit] if number >= 0 else ()
