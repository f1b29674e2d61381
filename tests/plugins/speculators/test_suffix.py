"""suffix: what most often followed in a tenant's recent outputs, bounded, and nothing of another tenant's."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from engine.core.speculators import SpeculatedSequence, SpeculatorSpec
from engine.core.tokens import TOKEN_TYPE
from engine.plugins.speculators.continuations import Continuations
from engine.plugins.speculators.suffix import Suffix, SuffixOptions
from engine.testing.speculators import SpeculatorConformance

SPEC = SpeculatorSpec(vocab_size=1000, max_len=100_000, max_drafts=8)


class TestSuffix(SpeculatorConformance):
    speculator = Suffix


def suffix(**options: Any) -> Suffix:
    return Suffix(SPEC, SuffixOptions(**options))


def ids(tokens: list[int]) -> array[int]:
    return array(TOKEN_TYPE, tokens)


def finish(speculator: Suffix, output: list[int], *, tenant: str | None = None, name: str = "old") -> None:
    """A request with this output, from its first proposal to its end."""
    tokens = [999, *output]
    speculator.propose(SpeculatedSequence(request_id=name, tokens=tokens, prompt_length=1, tenant=tenant), 1)
    speculator.finished(name)


def propose(speculator: Suffix, tokens: list[int], limit: int = 3, *, tenant: str | None = None) -> list[int]:
    """A proposal for a request of these tokens, which ends then without a trace: its output is empty."""
    sequence = SpeculatedSequence(request_id="new", tokens=tokens, prompt_length=len(tokens), tenant=tenant)
    found = list(speculator.propose(sequence, limit))
    speculator.finished("new")
    return found


def test_what_followed_in_an_earlier_output_is_proposed() -> None:
    speculator = suffix()
    assert propose(speculator, [7, 1, 2]) == []
    finish(speculator, [1, 2, 3, 4, 5])
    assert propose(speculator, [7, 1, 2]) == [3, 4, 5]
    assert propose(speculator, [7, 1, 2], 2) == [3, 4]
    assert propose(speculator, [7, 4, 5]) == [], "the output ended there"
    assert propose(speculator, [7, 999, 1]) == [], "prompts are not kept"


def test_nothing_passes_from_tenant_to_tenant() -> None:
    speculator = suffix()
    finish(speculator, [1, 2, 3, 4], tenant="a")
    assert propose(speculator, [1, 2], tenant="a") == [3, 4]
    assert propose(speculator, [1, 2], tenant="b") == []
    assert propose(speculator, [1, 2]) == []


def test_the_most_frequent_continuation_is_proposed_as_far_as_it_is_confident() -> None:
    speculator = suffix(min_confidence=0.5)
    for number, output in enumerate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 8, 4, 6], [1, 2, 3, 9, 6]]):
        finish(speculator, output, name=str(number))
    assert propose(speculator, [1, 2]) == [3], "3 of 4 and one more; then 4 only in 2"
    assert propose(suffix(), [1, 2]) == []
    eager = suffix(min_confidence=0.0)
    for number, output in enumerate([[1, 2, 3, 4, 5], [1, 2, 8, 4, 6], [1, 2, 8, 4, 7]]):
        finish(eager, output, name=str(number))
    assert propose(eager, [1, 2])[:2] == [8, 4]


def test_a_long_agreement_wins_over_a_frequent_short_one() -> None:
    speculator = suffix()
    finish(speculator, [11, 12, 13, 14, 15, 16, 17, 18, 50, 51])
    for number in range(5):
        finish(speculator, [17, 18, 60, 61], name=str(number))
    assert propose(speculator, [11, 12, 13, 14, 15, 16, 17, 18], 2) == [50, 51]
    assert propose(speculator, [90, 17, 18], 2) == [60, 61]


def test_the_own_tokens_are_looked_up_before_a_short_agreement_elsewhere() -> None:
    speculator = suffix()
    finish(speculator, [1, 2, 3, 4])
    assert propose(speculator, [1, 2, 7, 8, 1, 2], 2) == [7, 8]


def test_the_tenant_that_was_idle_longest_is_forgotten() -> None:
    speculator = suffix(tenants=2)
    for tenant in ("a", "b", "a", "c"):
        finish(speculator, [1, 2, 3], tenant=tenant)
    assert [len(propose(speculator, [1, 2], tenant=tenant)) for tenant in ("a", "b", "c")] == [1, 0, 1]


def test_a_request_without_output_leaves_nothing() -> None:
    speculator = suffix()
    propose(speculator, [1, 2, 3], tenant="a")
    speculator.finished("never seen")
    assert not speculator._tenants
    assert not speculator._requests


def test_old_outputs_are_forgotten_and_memory_stays_bounded() -> None:
    index = Continuations((4, 2), 1024)
    index.add(ids([1, 2, 3, 4, 5]))
    pick = random.Random(0)
    for _ in range(100):
        index.add(ids(pick.choices(range(100, 900), k=50)))
        assert len(index) <= 1024
    assert index.continuation(ids([1, 2, 3, 4]), 3, 0.0) == []
    index.add(ids([1, 2, 3, 4, 5]))
    assert index.continuation(ids([1, 2, 3, 4]), 3, 0.0) == [5]
    for _ in range(10):
        index.add(ids(pick.choices(range(100, 900), k=40)))
    assert index.continuation(ids([1, 2, 3, 4]), 3, 0.0) == [5], "still in the older half"
    index.add(ids([1, 2, *range(2000)]))
    assert len(index) <= 1024
    assert index.continuation(ids([1997, 1998]), 3, 0.0) == [1999]


@pytest.mark.parametrize("seed", range(4))
def test_places_are_those_of_a_search_through_all_texts(seed: int) -> None:
    """All places of n-grams of which there are few; none that is wrong."""
    pick = random.Random(seed)
    texts = [pick.choices(range(40), k=pick.randint(0, 60)) for _ in range(12)]
    index = Continuations((3, 2), 4096)
    for text in texts:
        index.add(ids(text))
    half = index._halves[0]
    joined = half.tokens.tolist()
    for n in (2, 3):
        for _ in range(200):
            last = pick.choices(range(40), k=n)
            wanted = [place for place in range(n, len(joined)) if joined[place - n : place] == last]
            assert half.places(ids(last)) == wanted[::-1][:8]


@pytest.mark.parametrize("options", [{"tokens": 5}, {"context": 5}, {"tenants": 0}, {"min_confidence": 1.5}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"(tokens|context|tenants|min_confidence) is"):
        suffix(**options)
