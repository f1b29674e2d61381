"""Speculators of every quality, for the fake model."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence

from engine.core.speculators.base import SpeculatedSequence, Speculator, SpeculatorSpec
from engine.core.speculators.checked_speculator import CheckedSpeculator

from .fake_runner import VOCABULARY, next_token


class Perfect(Speculator):
    """Proposes what the fake model will sample, for requests whose tenant is their seed; as many tokens as may be."""

    api = "1"

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        tokens = list(sequence.tokens)
        for _ in range(limit):
            tokens.append(next_token(tokens, int(sequence.tenant or 0)))
        return tokens[-limit:]


class Random(Perfect):
    """Now and then proposes something: a right beginning, some more tokens."""

    def __init__(self, spec: SpeculatorSpec, options: object = None) -> None:
        super().__init__(spec, options)
        self.random = random.Random(0)

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        right = self.random.randint(0, limit)
        drafts = [*super().propose(sequence, limit)[:right], *self.random.choices(range(VOCABULARY), k=limit)]
        return drafts[: self.random.randint(0, limit)]


class Adversarial(Perfect):
    """Proposes as many tokens as may be, the last of which is wrong, or the first."""

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        drafts = list(super().propose(sequence, limit))
        at = -1 if len(sequence.tokens) % 2 else 0
        drafts[at] = (drafts[at] + 1) % VOCABULARY
        return drafts


class Failing(Random):
    """Raises now and then, gives invalid answers, and is interrupted by Ctrl-C."""

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        if self.random.random() < 0.1:
            signal.raise_signal(signal.SIGINT)
        invalid: list[object] = [[-1] * limit, [VOCABULARY], [3] * (limit + 1), ["a"], 7, None]
        answers: list[Callable[[], object]] = [lambda answer=answer: answer for answer in invalid]  # type: ignore[misc]
        answer = self.random.choice([*answers, *[lambda: super(Failing, self).propose(sequence, limit)] * 6])()
        if answer is None:
            raise LookupError("propose")
        return answer  # type: ignore[return-value]

    def accepted(self, request_id: str, verified: int, accepted: int) -> None:
        assert 0 <= accepted <= verified > 0
        raise LookupError("accepted")

    def finished(self, request_id: str) -> None:
        raise LookupError("finished")


def checked(speculator: type[Speculator], max_drafts: int) -> CheckedSpeculator:
    spec = SpeculatorSpec(vocab_size=VOCABULARY, max_len=1000, max_drafts=max_drafts)
    return CheckedSpeculator(speculator(spec), spec)
