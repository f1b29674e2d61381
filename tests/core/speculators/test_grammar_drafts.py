"""Proposals keep to the grammar of their request, and what it forces is proposed too."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from engine.core.grammars.base import CompiledGrammar, GrammarMatcher
from engine.core.speculators.grammar_drafts import GrammarDrafts


class Texts(GrammarMatcher):
    """Allows one text of several, a token per character; forces what all that are left have in common."""

    is_terminated = False

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, self.done = texts, ""
        self.asked = 0

    def fill_mask(self, mask: Any) -> None:
        raise AssertionError("a proposal needs no mask")

    def accept(self, token: int) -> bool:
        longer = self.done + chr(token)
        if not any(text.startswith(longer) for text in self.texts):
            return False
        self.done = longer
        return True

    def rollback(self, count: int) -> None:
        self.done = self.done[: len(self.done) - count]

    def forced_tokens(self) -> list[int]:
        self.asked += 1
        rests = [text[len(self.done) :] for text in self.texts if text.startswith(self.done)]
        count = 0
        while all(rest[: count + 1] == rests[0][: count + 1] and count < len(rest) for rest in rests):
            count += 1
        return [ord(one) for one in rests[0][:count]]


OWNER = "grammar 'texts' of engine-texts 0.4"


class Compiled(CompiledGrammar):
    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher

    def matcher(self) -> GrammarMatcher:
        return self._matcher


def drafts(*texts: str) -> tuple[GrammarDrafts, Texts]:
    matcher, compiled = Texts(texts), Future[CompiledGrammar]()
    compiled.set_result(Compiled(matcher))
    return GrammarDrafts("a", compiled, OWNER), matcher


def choose(one: GrammarDrafts, output: str, proposal: str, limit: int = 9) -> str:
    return "".join(map(chr, one.choose(list(map(ord, output)), tuple(map(ord, proposal)), limit)))


def test_a_proposal_ends_before_the_first_token_that_is_refused() -> None:
    one, _ = drafts("abcd", "xyz")
    assert choose(one, "", "abxd") == "ab"
    assert not one.proposed
    assert choose(one, "ab", "xx") == "cd"
    assert one.proposed
    assert choose(one, "ab", "cd", 2) == "cd"
    assert not one.proposed
    assert choose(one, "abcd", "e") == ""
    assert not one.proposed


def test_forced_tokens_are_proposed_where_they_are_more() -> None:
    one, matcher = drafts("abcd", "abce")
    assert choose(one, "", "") == "abc"
    assert choose(one, "", "ab") == "abc"
    assert one.proposed
    assert choose(one, "", "abce") == "abce"
    assert not one.proposed
    assert choose(one, "", "", 2) == "ab"
    assert matcher.asked == 1
    assert choose(one, "abc", "") == ""
    assert choose(one, "abce", "") == ""
    assert matcher.asked == 3
    assert choose(one, "abce", "") == ""
    assert matcher.asked == 3


def test_a_long_forced_text_is_found_once_as_long_as_the_output_follows_it() -> None:
    text = "ab" * 200
    one, matcher = drafts(text)
    for at in range(len(text) - 4):
        assert choose(one, text[:at], "", 4) == text[at : at + 4]
    assert matcher.asked == 1


def test_a_long_forced_text_that_the_output_spells_otherwise_is_seldom_found_again() -> None:
    one, matcher = drafts("", "")
    forced = [ord("x")] * 3200
    matcher.accept = lambda token: True  # type: ignore[method-assign]
    matcher.forced_tokens = lambda: asked.append(1) or forced  # type: ignore[func-returns-value,method-assign]
    asked: list[int] = []
    for at in range(500):
        choose(one, "y" * at, "")
    assert 4 <= len(asked) <= 5
    forced = [ord("x")] * 31
    asked.clear()
    for at in range(600, 700):
        choose(one, "y" * at, "")
    assert len(asked) == 100


def test_proposals_stay_as_they_are_until_the_grammar_is_compiled() -> None:
    compiled = Future[CompiledGrammar]()
    one = GrammarDrafts("a", compiled, OWNER)
    assert choose(one, "a", "xy") == "xy"
    compiled.set_result(Compiled(Texts(["abc"])))
    assert choose(one, "a", "xy") == "bc"


@pytest.mark.parametrize("fault", ["accept", "count_allowed", "forced_tokens", "matcher", "output"])
def test_nothing_is_proposed_after_a_failure(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*arguments: object) -> Any:
        raise KeyError("tide")

    one, matcher = drafts("abcd")
    if fault != "forced_tokens":  # what was forced is known then
        assert choose(one, "", "x") == "abcd"
    if fault == "matcher":
        compiled = Future[CompiledGrammar]()
        compiled.set_exception(KeyError("tide"))
        one = GrammarDrafts("a", compiled, OWNER)
    elif fault != "output":
        setattr(matcher, fault, fail)
    for output in ("ax" if fault == "output" else "a", "ab", "abc"):
        assert choose(one, output, "bcd"[len(output) - 1 : -1]) == ""
    assert not one.proposed
    [record] = caplog.records
    assert f"nothing is proposed any more for request a, whose grammar, of {OWNER}, fails" in record.message
    assert (record.exc_info is None) == (fault == "output")
    assert ("token 120 came after 1 tokens" if fault == "output" else "tide") in record.message
