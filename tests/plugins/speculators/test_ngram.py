"""ngram: what followed the last tokens at an earlier occurrence, against a search through all tokens."""

from __future__ import annotations

import random
import sys

import pytest

from engine.core.speculators import SpeculatedSequence, SpeculatorSpec
from engine.core.tokens import Tokens
from engine.plugins.speculators.ngram import Ngram, NgramOptions
from engine.plugins.speculators.ngram_index import NgramIndex

SPEC = SpeculatorSpec(vocab_size=1000, max_len=100_000, max_drafts=8)


def ngram(**options: int) -> Ngram:
    return Ngram(SPEC, NgramOptions(**options))


def sequence(tokens: list[int], name: str = "r") -> SpeculatedSequence:
    return SpeculatedSequence(request_id=name, tokens=tokens, prompt_length=len(tokens))


def places_of(tokens: list[int], n: int) -> list[int]:
    """The places after the earlier occurrences of the last n tokens."""
    end = len(tokens)
    return [place for place in range(n, end) if tokens[place - n : place] == tokens[end - n :]]


@pytest.mark.parametrize(
    ("options", "tokens", "limit", "proposal"),
    [
        ({}, [1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ({}, [1, 2, 3, 4, 5, 2], 2, []),
        ({"min_n": 1}, [1, 2, 3, 4, 5, 2], 2, [3, 4]),
        ({}, [1, 2, 3, 9, 1, 2, 5, 9, 1, 2], 2, [5, 9]),
        ({}, [7, 7, 1, 2, 3, 9, 8, 8, 1, 2, 5, 9, 7, 7, 1, 2], 2, [3, 9]),
        ({}, [5, 6, 5, 6], 5, [5, 6, 5, 6, 5]),
        ({}, [1], 2, []),
        ({}, [], 2, []),
        ({"min_n": 1, "max_n": 1}, [4, 4], 3, [4, 4, 4]),
    ],
    ids=["follows", "too few agree", "min_n", "latest", "longest first", "repetition", "one", "none", "same"],
)
def test_the_continuation_of_the_longest_agreeing_place_is_proposed(
    options: dict[str, int], tokens: list[int], limit: int, proposal: list[int]
) -> None:
    assert ngram(**options).propose(sequence(tokens), limit) == proposal


def test_a_place_is_followed_beyond_later_places_that_agree_in_fewer_tokens() -> None:
    first = [1, 2, 3, 4, 5, 6, 7, 8, 50]
    other = [2, 3, 4, 5, 6, 7, 8, 60]
    tokens = [*first, 99, *other, 98]
    speculator = ngram()
    seen = sequence(tokens)
    for token in first[:4]:
        tokens.append(token)
        speculator.propose(seen, 2)
    assert tokens[-4:] == [1, 2, 3, 4]
    for token in first[4:8]:
        tokens.append(token)
        proposal = speculator.propose(seen, 2)
    assert proposal == [50, 99]


@pytest.mark.parametrize("seed", range(6))
def test_every_proposal_is_what_followed_some_agreeing_place(seed: int) -> None:
    """A look-up may miss a place whose slot was overwritten, but what it finds is right, and it seldom misses."""
    pick = random.Random(seed)
    tokens = pick.choices(range(6), k=pick.choice([0, 1, 40, 600]))
    speculator, seen = ngram(min_n=2, max_n=4), sequence(tokens)
    found = missed = 0
    for _ in range(400):
        proposal = speculator.propose(seen, 3)
        places = places_of(tokens, 2)
        continuations = [(tokens[place:] * 3)[:3] for place in places]
        if proposal:
            found += 1
            assert proposal in [one[: len(proposal)] for one in continuations]
            assert len(proposal) == 3
        elif places:
            missed += 1
        copied = tokens[-30 : -30 + 3] if len(tokens) > 40 and pick.random() < 0.5 else pick.choices(range(6), k=1)
        tokens += copied
    assert found > 300
    assert missed <= 4


def test_indexing_one_by_one_and_in_bulk_gives_the_same() -> None:
    pick = random.Random(3)
    tokens = pick.choices(range(40), k=3000)
    slow, fast = NgramIndex((3, 2), context=32768), NgramIndex((3, 2), context=32768)
    for end in range(0, len(tokens), 7):
        slow.extend(tokens[:end])
        slow.continuation(4)
    fast.extend(tokens[:end])
    assert fast.continuation(4) == slow.continuation(4)
    slow._index()
    fast._index()
    assert places(fast, end) == places(slow, end)


def places(index: NgramIndex, end: int) -> list[tuple[int, ...]]:
    """What the tables of n-grams of 3 and of 2 tokens hold for each place."""
    three, two = index._tables
    return [(int(three[index._slot(place, 3)]), int(two[index._slot(place, 2)])) for place in range(3, end)]


def test_packed_tokens_give_the_proposals_of_lists() -> None:
    tokens = random.Random(1).choices(range(9), k=500)
    packed = SpeculatedSequence(request_id="p", tokens=Tokens(tokens), prompt_length=500)
    assert ngram().propose(packed, 5) == ngram().propose(sequence(tokens), 5) != []


@pytest.mark.parametrize(("context", "limit"), [(128, 72), (1024, 72), (1100, 136), (1030, 136), (2000, 136)])
def test_index_takes_at_most_the_documented_bytes_per_token_of_the_context_when_it_is_full(
    context: int, limit: int
) -> None:
    tokens = random.Random(4).choices(range(800), k=2 * context)
    index = NgramIndex((4, 2), context=context)
    for end in range(context, len(tokens) + 1, context // 2):
        index.extend(tokens[:end])
        index.continuation(2)
    assert index._room == len(index._tokens) == 2 * context
    memory = sum(table.nbytes for table in index._tables) + len(index._tokens) * index._tokens.itemsize
    assert memory <= limit * context


def test_tokens_before_the_context_are_forgotten_and_memory_stays_bounded() -> None:
    pick = random.Random(5)
    tokens = [900, 901, 902, *pick.choices(range(800), k=100)]
    speculator, seen = ngram(context=64), sequence(tokens)
    speculator.propose(seen, 2)
    for _ in range(3000):
        tokens.append(pick.randrange(800))
        speculator.propose(seen, 2)
    tokens += [900, 901]
    assert speculator.propose(seen, 1) == []
    index = speculator._indices["r"]
    assert len(index._tokens) <= 256
    assert sum(table.nbytes for table in index._tables) <= 2 * 4 * 4 * 256
    recent = tokens[-20:-16]
    tokens += recent
    assert speculator.propose(seen, 2) == tokens[-20:-18]


def test_a_long_text_that_comes_in_one_call_is_indexed_from_its_last_tokens_on() -> None:
    tokens = [1, 2, 3, *range(100, 400), 5, 6, 7, *range(500, 520), 5, 6]
    assert ngram(context=64).propose(sequence(tokens), 2) == [7, 500]
    assert ngram(context=64).propose(sequence([*tokens, 1, 2]), 2) == []


def test_a_look_up_compares_no_more_tokens_in_a_long_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of the interpreter per token: as many after 40,000 tokens as after 400."""

    def events(length: int) -> int:
        pick = random.Random(7)
        tokens = pick.choices(range(900), k=length)
        speculator, seen = ngram(), sequence(tokens)
        speculator.propose(seen, 4)
        count = 0

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal count
            count += 1
            return trace

        tokens.extend(pick.choices(range(900), k=1))
        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            speculator.propose(seen, 4)
        finally:
            sys.settrace(before)
        return count

    assert abs(events(40_000) - events(400)) < 30


def test_a_finished_request_leaves_nothing() -> None:
    speculator = ngram()
    speculator.propose(sequence([1, 2, 1], "a"), 1)
    speculator.propose(sequence([1, 2, 1], "b"), 1)
    speculator.finished("a")
    speculator.finished("never seen")
    assert list(speculator._indices) == ["b"]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (4, 2)),
        ({"min_n": 3, "max_n": 3}, (3,)),
        ({"min_n": 1, "max_n": 8}, (8, 4, 2, 1)),
        ({"min_n": 3, "max_n": 8}, (8, 4, 3)),
    ],
)
def test_sizes_halve_down_to_min_n(options: dict[str, int], sizes: tuple[int, ...]) -> None:
    assert NgramOptions(**options).sizes == sizes


@pytest.mark.parametrize("options", [{"min_n": 0}, {"max_n": 17}, {"min_n": 5, "max_n": 4}, {"context": 10}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"(min_n|max_n|context) is"):
        NgramOptions(**options)
