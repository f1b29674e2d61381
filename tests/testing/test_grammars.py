"""GrammarConformance passes a correct backend and fails backends with one fault each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars.base import CompiledGrammar, GrammarMatcher
from engine.core.grammars.grammar import Grammar
from engine.plugins.grammars.llguidance import LLGuidance
from engine.testing.grammar_cases import CASES, EMPTY, EOS, KEYWORDS, SPECIAL, TOKENS, WORDS
from engine.testing.grammars import GrammarConformance, allowed, bits


class Matcher(GrammarMatcher):
    """Passes everything on. The faulty matchers below override one method."""

    def __init__(self, inner: GrammarMatcher) -> None:
        self.inner = inner
        self.count = 0

    @property
    def is_terminated(self) -> bool:
        return self.inner.is_terminated

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        self.inner.fill_mask(mask)

    def accept(self, token: int) -> bool:
        taken = self.inner.accept(token)
        self.count += taken
        return taken

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)
        self.count -= count


class Compiled(CompiledGrammar):
    def __init__(self, inner: CompiledGrammar, cls: type[Matcher]) -> None:
        self.inner = inner
        self.cls = cls

    def matcher(self) -> GrammarMatcher:
        return self.cls(self.inner.matcher())


class Backend(LLGuidance):
    matcher: ClassVar[type[Matcher]] = Matcher

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return Compiled(super().compile(grammar), self.matcher)


class TestBackend(GrammarConformance):
    backend = Backend


class AllowsAll(Matcher):
    """Takes any text."""

    def accept(self, token: int) -> bool:
        return True


class Strict(Matcher):
    """Takes bytes alone."""

    def accept(self, token: int) -> bool:
        return token <= EOS and super().accept(token)


class EndsAnytime(Matcher):
    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        super().fill_mask(mask)
        mask[EOS // 32] |= 1 << (EOS % 32)

    def accept(self, token: int) -> bool:
        return token == EOS or super().accept(token)


class MasksTooLittle(Matcher):
    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        super().fill_mask(mask)
        mask[0] |= 1 << 7


class OrsBits(Matcher):
    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        new = np.zeros_like(mask)
        super().fill_mask(new)
        mask |= new


class Beyond(Matcher):
    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        super().fill_mask(mask)
        mask[-1] |= np.int32(-(2**31))


class TakesNothing(Matcher):
    """Allows an id without text."""

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        super().fill_mask(mask)
        mask[EMPTY // 32] |= 1 << (EMPTY % 32)


class OneEnd(Matcher):
    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        super().fill_mask(mask)
        if not self.is_terminated:
            mask[EOS // 32] &= ~np.int32(1 << (EOS % 32))

    def accept(self, token: int) -> bool:
        return (token != EOS or self.is_terminated) and super().accept(token)


class NeverTerminates(Matcher):
    @property
    def is_terminated(self) -> bool:
        return False


class GoesOn(Matcher):
    """Allows all tokens after the end."""

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        super().fill_mask(mask)
        if self.is_terminated:
            mask[0] = -1


class ForgetsEnd(Matcher):
    """Takes the end for no token."""

    def rollback(self, count: int) -> None:
        super().rollback(count + 1 if self.is_terminated and self.count > count else count)


class OneBack(Matcher):
    def rollback(self, count: int) -> None:
        super().rollback(min(count, 1))


class DraftChanges(Matcher):
    def fill_masks(self, masks: npt.NDArray[np.int32], draft: Sequence[int]) -> int:
        written = super().fill_masks(masks, draft)
        super().accept(draft[0])
        return written


class DraftGoesOn(Matcher):
    def fill_masks(self, masks: npt.NDArray[np.int32], draft: Sequence[int]) -> int:
        return super().fill_masks(masks, draft) and len(draft) + 1


class CountsAll(Matcher):
    def count_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)


class CountsAndStays(Matcher):
    """Does not go back."""

    def count_allowed(self, tokens: Sequence[int]) -> int:
        return sum(1 for _ in takewhile(self.accept, tokens))


class ForcesAnything(Matcher):
    """Forces a token that may come, where others may."""

    def forced_tokens(self) -> list[int]:
        return np.flatnonzero(allowed(self))[:1].tolist()


class ForcesWrong(Matcher):
    def forced_tokens(self) -> list[int]:
        return [*self.inner.forced_tokens(), SPECIAL]


class BatchesLate(Matcher):
    """Writes the masks of a batch one row further on."""

    @classmethod
    def fill_batch(cls, matchers: Sequence[GrammarMatcher], masks: npt.NDArray[np.int32]) -> Any:
        problems = super().fill_batch(matchers, masks)
        masks[:] = np.roll(masks, 1, axis=0)
        return problems


def with_matcher(matcher: type[Matcher]) -> type[Backend]:
    return type("Faulty", (Backend,), {"matcher": matcher})


class Shares(Backend):
    """Gives the same matcher to all."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        compiled = super().compile(grammar)
        matcher = compiled.matcher()
        compiled.matcher = lambda: matcher  # type: ignore[method-assign]
        return compiled


class Ignores(Backend):
    """Takes schemas without `not`."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return super().compile(Grammar(grammar.kind, grammar.source.replace('"not"', '"title"')))


class Unnamed(Backend):
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            return super().compile(grammar)
        except InvalidRequestError:
            raise InvalidRequestError("this is refused") from None


class TakesWrong(Backend):
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            return super().compile(grammar)
        except InvalidRequestError:
            return super().compile(CASES[0].grammar)


class KnowsNothing(Backend):
    kinds = frozenset({"gbnf"})


class OneThread(Backend):
    """Gives the grammar of the last call, of whatever thread."""

    last: Grammar | None = None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        cls = type(self)
        cls.last, before = grammar, cls.last
        if before is not None and before.source != grammar.source and '"title": "9"' in grammar.source:
            return super().compile(Grammar.regex("x"))
        return super().compile(grammar)


def broken(backend: type[Backend], test: str, *arguments: Any) -> None:
    suite: Any = type("Suite", (GrammarConformance,), {"backend": backend})()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(suite, test)(*arguments)


@pytest.mark.parametrize(
    ("matcher", "test", "arguments"),
    [
        (AllowsAll, "test_texts", ()),
        (Strict, "test_texts", ()),
        (EndsAnytime, "test_random_outputs", (0,)),
        (MasksTooLittle, "test_mask_and_accept", (0,)),
        (OrsBits, "test_masks", ()),
        (Beyond, "test_masks", ()),
        (TakesNothing, "test_special_tokens", ()),
        (OneEnd, "test_end", ()),
        (EndsAnytime, "test_end", ()),
        (NeverTerminates, "test_end", ()),
        (GoesOn, "test_end", ()),
        (ForgetsEnd, "test_rollback", (0,)),
        (OneBack, "test_rollback", (0,)),
        (DraftChanges, "test_drafts", ()),
        (DraftGoesOn, "test_drafts", ()),
        (CountsAll, "test_allowed_tokens", ()),
        (CountsAndStays, "test_allowed_tokens", ()),
        (ForcesAnything, "test_forced_tokens", (0,)),
        (ForcesWrong, "test_forced_tokens", (0,)),
        (BatchesLate, "test_batches", ()),
    ],
)
def test_the_suite_fails_a_faulty_matcher(matcher: type[Matcher], test: str, arguments: tuple[int, ...]) -> None:
    broken(with_matcher(matcher), test, *arguments)


@pytest.mark.parametrize(
    ("backend", "test", "arguments"),
    [
        (Shares, "test_matchers_are_independent", ()),
        (Ignores, "test_keywords", KEYWORDS[0]),
        (Unnamed, "test_keywords", KEYWORDS[0]),
        (TakesWrong, "test_wrong_grammars", ()),
        (KnowsNothing, "test_texts", ()),
        (OneThread, "test_threads", ()),
    ],
)
def test_the_suite_fails_a_faulty_backend(backend: type[Backend], test: str, arguments: tuple[Any, ...]) -> None:
    broken(backend, test, *arguments)


def test_bits_are_counted_from_the_lowest() -> None:
    mask = np.zeros(WORDS, np.int32)
    mask[EOS // 32] = 1 << (EOS % 32)
    assert np.flatnonzero(bits(mask)).tolist() == [EOS]
    assert len(TOKENS) < 32 * WORDS
