"""SpeculatorConformance passes correct speculators and fails speculators with one fault each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.core.speculators import SpeculatedSequence, Speculator
from engine.plugins.speculators.ngram import Ngram
from engine.testing.speculators import SpeculatorConformance


class Last(Speculator):
    """Proposes the last token again, correct. The faulty speculators below override one method."""

    api = "1"

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Any:
        return [sequence.tokens[-1]] * limit


class TestLast(SpeculatorConformance):
    speculator = Last


class TestNgram(SpeculatorConformance):
    speculator = Ngram


class TooMany(Last):
    def propose(self, sequence: SpeculatedSequence, limit: int) -> Any:
        return [1] * (limit + 1)


class Beyond(Last):
    def propose(self, sequence: SpeculatedSequence, limit: int) -> Any:
        return [sequence.tokens[-1] + 1]


class Floats(Last):
    def propose(self, sequence: SpeculatedSequence, limit: int) -> Any:
        return [1.0]


class Generator(Last):
    def propose(self, sequence: SpeculatedSequence, limit: int) -> Any:
        return iter([1])


class Writes(Last):
    def propose(self, sequence: SpeculatedSequence, limit: int) -> Any:
        assert isinstance(sequence.tokens, list)
        sequence.tokens.append(1)
        return ()


class Common(Last):
    """Learns which token follows which, for all tenants together."""

    def __init__(self, spec: Any, options: Any) -> None:
        super().__init__(spec, options)
        self.after: dict[int, int] = {}

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        last, before = sequence.tokens[-1], sequence.tokens[-2] if len(sequence.tokens) > 1 else 0
        self.after[before] = last
        return [self.after[last]] if last in self.after else ()


class Hoards(Last):
    def __init__(self, spec: Any, options: Any) -> None:
        super().__init__(spec, options)
        self.seen: list[SpeculatedSequence] = []

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Any:
        self.seen.append(sequence)
        return ()


class Strict(Last):
    def finished(self, request_id: str) -> None:
        raise KeyError(request_id)


@pytest.mark.parametrize(
    ("speculator", "test", "arguments"),
    [
        (TooMany, "test_proposals_are_valid", (0,)),
        (Beyond, "test_proposals_are_valid", (0,)),
        (Floats, "test_proposals_are_valid", (0,)),
        (Generator, "test_proposals_are_valid", (0,)),
        (Writes, "test_proposals_are_valid", (0,)),
        (Common, "test_nothing_of_one_tenant_shows_for_another", ()),
        (Common, "test_requests_that_run_together_are_kept_apart", ()),
        (Hoards, "test_a_finished_request_is_forgotten", ()),
        (Strict, "test_a_finished_request_is_forgotten", ()),
    ],
)
def test_a_fault_is_found(speculator: type[Last], test: str, arguments: tuple[int, ...]) -> None:
    suite = type("Suite", (SpeculatorConformance,), {"speculator": speculator})()
    with pytest.raises((AssertionError, KeyError)):
        getattr(suite, test)(*arguments)
