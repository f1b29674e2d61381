"""Conformance suite for speculators: valid proposals, nothing kept of what ended, nothing shown to other tenants."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from attrs import asdict

from engine.core.speculators import SpeculatedSequence, Speculator, SpeculatorSpec
from engine.core.types import SamplingParams

if TYPE_CHECKING:
    from engine.core.engine import Engine


class SpeculatorConformance:
    """Derive a class named Test... from this class and set `speculator`."""

    speculator: ClassVar[type[Speculator[Any]]]
    options: ClassVar[Any] = None
    """Options passed to the speculator; None: the defaults of its options_class."""
    spec: ClassVar[SpeculatorSpec] = SpeculatorSpec(vocab_size=512, max_len=4096, max_drafts=8)

    def make(self) -> Speculator[Any]:
        """A fresh speculator."""
        assert self.speculator.refuses(self.spec) is None, f"the speculator refuses {self.spec}; set another spec"
        options = self.options
        if options is None and self.speculator.options_class is not None:
            options = self.speculator.options_class()
        return self.speculator(self.spec, options)

    @pytest.mark.parametrize("seed", range(6))
    def test_proposals_are_valid(self, seed: int) -> None:
        """Proposals are at most `limit` ints of the vocabulary, for any tokens and any number of new ones per call."""
        pick = random.Random(seed)
        speculator = self.make()
        for number in range(4):
            tokens = self.text(pick, pick.choice((1, 2, 17, 300)))
            sequence = SpeculatedSequence(
                request_id=f"r{number}", tokens=tokens, prompt_length=len(tokens), tenant=pick.choice((None, "a"))
            )
            for _ in range(40):
                limit = pick.randint(1, self.spec.max_drafts)
                kept = list(tokens)
                proposal = self.propose(speculator, sequence, limit)
                assert tokens == kept, "propose() changed the tokens of the sequence"
                if proposal:
                    speculator.accepted(sequence.request_id, len(proposal), pick.randint(0, len(proposal)))
                tokens += self.text(pick, pick.choice((0, 1, 1, 2, 5)))
            speculator.finished(sequence.request_id)

    def test_requests_that_run_together_are_kept_apart(self) -> None:
        """Proposals for a request are the same whether others run at the time or not."""
        pick = random.Random(7)
        texts = [self.text(pick, 200) for _ in range(3)]
        alone, together = [self.run(self.make(), [text]) for text in texts], self.run(self.make(), texts, tenants=True)
        assert [alone[number][0] for number in range(3)] == together

    def test_nothing_of_one_tenant_shows_for_another(self) -> None:
        """Proposals for a tenant are the same whether another's requests came before or not."""
        pick = random.Random(8)
        secret = self.text(pick, 400)
        speculator = self.make()
        for number in range(3):
            self.replay(speculator, secret, f"secret{number}", "one")
        beginning = secret[:100]
        for tenant in ("two", None):
            found = self.replay(speculator, beginning, f"r{tenant}", tenant)
            assert found == self.replay(self.make(), beginning, "r", tenant), (
                "what a tenant wrote shows in proposals for another: keep what is learned apart by sequence.tenant"
            )

    def test_a_finished_request_is_forgotten(self) -> None:
        """No sequence is held once its request has ended, and an id may come again with other tokens."""
        speculator = self.make()
        pick = random.Random(9)
        for _ in range(3):
            sequence = SpeculatedSequence(request_id="again", tokens=self.text(pick, 50), prompt_length=50)
            self.propose(speculator, sequence, 2)
            speculator.finished("again")
            held = weakref.ref(sequence)
            del sequence
            gc.collect()
            assert held() is None, "the sequence is still held after finished()"
        speculator.finished("never seen")

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_no_token_changes_in_an_engine(self, make_engine: Callable[..., Engine], temperature: float) -> None:
        """An engine that speculates generates the tokens of one that does not, with a seed also above temperature 0."""
        given = {} if self.options is None else {"speculator__options": asdict(self.options)}
        engine = make_engine(speculator=self.speculator, speculator__length="fixed", **given)
        prompts = ["def f(x):\n    return x\n\n\ndef g(x):\n    return", "a b a b a b a b", "x"]
        params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
        expected = [one.token_ids for one in make_engine().generate(prompts, params)]
        assert [one.token_ids for one in engine.generate(prompts, params)] == expected
        speculation = engine.stats().speculation
        assert speculation is not None
        assert not speculation.faults, f"the speculator failed in {speculation.faults} calls; the log says how"

    def run(
        self, speculator: Speculator[Any], texts: Sequence[list[int]], *, tenants: bool = False
    ) -> list[list[list[int]]]:
        """Proposals for texts that are replayed in turns; tenants: each text is another tenant's."""
        sequences = [
            SpeculatedSequence(
                request_id=f"r{number}", tokens=text[:20], prompt_length=20, tenant=f"t{number}" if tenants else "t"
            )
            for number, text in enumerate(texts)
        ]
        found: list[list[list[int]]] = [[] for _ in texts]
        for end in range(20, 120):
            for sequence, text, proposals in zip(sequences, texts, found, strict=True):
                assert isinstance(sequence.tokens, list)
                sequence.tokens.append(text[end])
                proposals.append(self.propose(speculator, sequence, 3))
        return found

    def replay(self, speculator: Speculator[Any], text: list[int], name: str, tenant: str | None) -> list[list[int]]:
        """Proposals for one text as it grows; finishes the request at the end."""
        tokens = text[:10]
        sequence = SpeculatedSequence(request_id=name, tokens=tokens, prompt_length=10, tenant=tenant)
        found = []
        for token in text[10:]:
            tokens.append(token)
            found.append(self.propose(speculator, sequence, 4))
        speculator.finished(name)
        return found

    def propose(self, speculator: Speculator[Any], sequence: SpeculatedSequence, limit: int) -> list[int]:
        """A proposal, checked."""
        proposal = speculator.propose(sequence, limit)
        assert isinstance(proposal, Sequence), f"propose() returned {proposal!r}, not a sequence"
        assert len(proposal) <= limit, f"propose() returned {len(proposal)} tokens where {limit} were asked for"
        for token in proposal:
            assert type(token) is int, f"propose() returned {token!r}, not an int"
            assert 0 <= token < self.spec.vocab_size, f"propose() returned {token}, beyond the vocabulary"
        return list(proposal)

    def text(self, pick: random.Random, length: int) -> list[int]:
        """Tokens in which stretches repeat, as in code and JSON; the last id of the vocabulary is frequent."""
        tokens = [pick.choice((self.spec.vocab_size - 1, pick.randrange(self.spec.vocab_size)))]
        while len(tokens) < length:
            if len(tokens) > 8 and pick.random() < 0.3:
                start = pick.randrange(len(tokens) - 4)
                tokens += tokens[start : start + pick.randint(2, 12)]
            else:
                tokens.append(pick.randrange(self.spec.vocab_size))
        return tokens[:length]
