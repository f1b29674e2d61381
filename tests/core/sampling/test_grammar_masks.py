"""Masks rule tokens out, and a grammar that fails ends its own request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.core.engine import Engine
from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.grammars.base import CompiledGrammar, GrammarBackend, GrammarMatcher, GrammarVocabulary
from engine.core.grammars.grammar import Grammar
from engine.core.sampling.arithmetic import apply_masks
from engine.core.sampling.sampler import Sampler
from engine.core.speculators.grammar_drafts import GrammarDrafts
from engine.core.types import NewSequence, SamplingParams
from tests.core.told_speculator import Told


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_masks_rule_out_the_tokens_whose_bits_are_0(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    allowed = random.random((3, vocab)) < 0.5
    padded = np.zeros((3, -(-vocab // 32) * 32), bool)
    padded[:, :vocab] = allowed
    masks = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    logits = torch.from_numpy(random.standard_normal((3, vocab), np.float32))
    expected = np.where(allowed, logits.numpy(), -np.inf)
    assert np.array_equal(apply_masks(logits, masks).numpy(), expected)


OWNER = "grammar 'Fails' passed in from Python"


class Fails(GrammarBackend[None]):
    """Allows every token, and fails as the grammar says after as many tokens."""

    api = "1"
    kinds = frozenset({"complex", "mask", "accept", "refuse", "matcher", "exit", "unreadable"})

    def __init__(self, vocabulary: GrammarVocabulary, options: None) -> None:
        pass

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return FailingGrammar(grammar)


class FailingGrammar(CompiledGrammar):
    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar

    def matcher(self) -> GrammarMatcher:
        if self.grammar.kind == "matcher":
            raise KeyError("tide")
        return FailingMatcher(self.grammar)


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class FailingMatcher(GrammarMatcher):
    def __init__(self, grammar: Grammar) -> None:
        self.kind, self.left = grammar.kind, int(grammar.source)

    @property
    def is_terminated(self) -> bool:
        return False

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        if self.left == 0:
            self.fail()
        mask[:] = -1

    def fail(self) -> None:
        if self.kind == "complex":
            raise InvalidRequestError("this is too complex")
        if self.kind == "mask":
            raise KeyError("tide")
        if self.kind == "exit":
            raise SystemExit("tide")
        if self.kind == "unreadable":
            raise UnreadableError

    def accept(self, token: int) -> bool:
        self.left -= 1
        if self.kind == "accept" and self.left < 0:
            raise KeyError("tide")
        return self.kind != "refuse" or self.left >= 0

    def rollback(self, count: int) -> None:
        raise NotImplementedError


FAILURES = [
    ("complex", 3, 3, f"sequence {{}} cannot go on by its grammar, of {OWNER}: this is too complex"),
    ("mask", 3, 3, f"sequence {{}} cannot go on: {OWNER} failed in fill_mask(): KeyError: 'tide'"),
    ("exit", 3, 3, f"sequence {{}} cannot go on: {OWNER} failed in fill_mask(): SystemExit: tide"),
    ("unreadable", 3, 3, "fill_mask(): UnreadableError: an exception whose str() raises ValueError"),
    ("refuse", 3, 4, "came after 3 tokens, where it may not"),  # the mask had allowed it
    ("accept", 3, 4, f"sequence {{}} cannot go on: {OWNER} failed in accept(): KeyError: 'tide'"),
    ("matcher", 0, 0, f"sequence {{}} cannot go on: {OWNER} failed in matcher(): KeyError: 'tide'"),
]
"""Kind of a grammar, after how many tokens it fails, how many tokens its request has, and what the log says."""


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_grammar_that_fails_ends_its_request_alone_and_is_named(
    make_engine: Callable[..., Engine], overlap: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(grammar=Fails, scheduler__overlap=overlap)
    limit = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=[])
    [free] = engine.generate([[1, 2, 3]], limit)
    for number, (kind, left, tokens, reason) in enumerate(FAILURES):
        caplog.clear()
        failing = SamplingParams(max_tokens=8, temperature=0.0, grammar=Grammar(kind, str(left)))
        broken, other = engine.generate([[4, 5, 6], [1, 2, 3]], [failing, limit])
        assert other.token_ids == free.token_ids
        assert (broken.finish_reason, len(broken.token_ids)) == ("error", tokens)
        assert f"no token may follow after {tokens} tokens of output: {OWNER} cannot go on" in str(broken.error)
        [record] = caplog.records
        assert reason.format(2 + 2 * number) in record.message
        assert ("(): " in reason) == (record.exc_info is not None)
    assert engine.generate([[1, 2, 3]], limit)[0].token_ids == free.token_ids


class Poisoned(GrammarBackend[None]):
    """Allows every token, and fails for good as the grammar says at one of them."""

    api = "1"
    kinds = frozenset({"mask", "accept", "refuse", "rollback"})

    def __init__(self, vocabulary: GrammarVocabulary, options: None) -> None:
        pass

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return PoisonedGrammar(grammar)


class PoisonedGrammar(FailingGrammar):
    def matcher(self) -> GrammarMatcher:
        return PoisonedMatcher(self.grammar)


class PoisonedMatcher(GrammarMatcher):
    is_terminated = False

    def __init__(self, grammar: Grammar) -> None:
        self.kind, self.poison, self.broken = grammar.kind, int(grammar.source), False

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        if self.broken:
            raise InvalidRequestError("this is too complex")
        mask[:] = -1

    def accept(self, token: int) -> bool:
        poisoned = token == self.poison
        if poisoned and self.kind == "accept":
            self.broken = True
            raise KeyError("tide")
        if poisoned and self.kind == "mask":
            self.broken = True
        return not (poisoned and self.kind == "refuse")

    def rollback(self, count: int) -> None:
        if self.broken or self.kind == "rollback":
            self.broken = True
            raise KeyError("ebb")


@pytest.mark.parametrize("kind", sorted(Poisoned.kinds))
def test_a_failure_amid_drafts_counts_only_where_the_output_comes_to_it(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(
        GrammarDrafts, "choose", lambda self, output, proposal, limit: proposal
    )  # else it may fail first
    engine = make_engine(grammar=Poisoned, speculator=Told, speculator__length="fixed", speculator__max_drafts=4)
    prompt = (4, 5, 6)

    def run(poison: int) -> Any:
        params = SamplingParams(max_tokens=16, temperature=0.0, grammar=Grammar(kind, str(poison)))
        [done] = engine.generate([prompt], params)
        return done.token_ids, done.finish_reason

    Told.tell({})
    [free] = engine.generate([prompt], SamplingParams(max_tokens=16, temperature=0.0))
    tokens = free.token_ids
    wrong = next(token for token in range(500) if token not in tokens)
    for at in range(1, len(tokens) - 1):
        Told.tell({prompt: (*tokens[:at], wrong, *tokens[at + 1 :])})
        assert run(wrong) == (tokens, "length")
        Told.tell({})
        alone = run(tokens[at])
        Told.tell({prompt: tokens})
        assert run(tokens[at]) == alone
        assert alone[1] == ("length" if kind == "rollback" else "error")
    Told.tell({})
    stats = engine.stats().speculation
    assert stats is not None
    assert sum(stats.accepted) > 0


def test_a_sampler_that_compiles_no_grammars_refuses_one() -> None:
    sampler = Sampler(16, "cpu", frozenset({1}), max_running=1, fused=False)
    new = NewSequence(sequence=1, tokens=(2,), prompt_len=1, params=SamplingParams(seed=0, grammar=Grammar.regex("a")))
    with pytest.raises(ExecutorError, match="cannot compile any"):
        sampler.add(new, 0)
