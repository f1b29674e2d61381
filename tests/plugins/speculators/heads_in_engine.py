"""Engines with drafting heads: requests, and comparison of their proposals with those of a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine, SamplingParams
from engine.core.schedulers.drafting import Drafting
from engine.core.schedulers.request_state import RequestState
from engine.core.types import Request

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [tuple((7 * row + 3 * column) % 256 for column in range(5 + 13 * row)) for row in range(4)]
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=20, ignore_eos=True)
Received = list[tuple[str, int, Sequence[int]]]
"""(request, its number of tokens, the proposal) of each proposal that comes from the device."""


def note_proposals(monkeypatch: pytest.MonkeyPatch) -> Received:
    """A list to which the proposals that come from the device are added, as they come."""
    found: Received = []
    receive = Drafting.receive

    def noted(self: Drafting, states: Sequence[RequestState], proposals: Sequence[Sequence[int]]) -> None:
        received = zip(states, proposals, strict=bool(proposals))
        found.extend((state.id, len(state.tokens), tokens) for state, tokens in received if not state.finished)
        receive(self, states, proposals)

    monkeypatch.setattr(Drafting, "receive", noted)
    return found


def build(target: Path, speculator: str, heads: Path | None = None, **settings: Any) -> Engine:
    """An engine on the CPU. speculator: empty for none; heads: its checkpoint; None: it has none of its own."""
    common: dict[str, Any] = {
        "executor__device": "cpu",
        "cache__memory": "8MiB",
        "model__max_len": 256,
        "model__dtype": "float32",
    }
    if speculator:
        common |= {"speculator": speculator, "speculator__length": "fixed"}
    if heads is not None:
        common["speculator__model"] = str(heads)
    return Engine(model=str(target), **{**common, **settings})


def run(engine: Engine, predictions: Sequence[tuple[int, ...]] = ()) -> list[tuple[int, ...]]:
    """The outputs for PROMPTS, all at the same time. predictions: predicted output of each, if any."""
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    for number, prompt in enumerate(PROMPTS):
        prediction = predictions[number] if predictions else ()
        engine.add(Request(id=str(number), prompt=prompt, params=GREEDY, prediction=prediction))
    for _ in range(500):
        for output in engine.step():
            outputs[output.request] += output.tokens
        if all(len(tokens) == GREEDY.max_tokens for tokens in outputs.values()):
            break
    return [tuple(tokens) for tokens in outputs.values()]


def check(
    propose: Callable[[Sequence[int], int], list[int]], received: Received, outputs: Sequence[tuple[int, ...]]
) -> None:
    """Compare every proposal received with the reference's. propose: that many tokens after some tokens."""
    compared = 0
    for name, length, tokens in received:
        whole = (*PROMPTS[int(name)], *outputs[int(name)])[:length]
        assert list(tokens) == propose(whole, len(tokens))
        compared += len(tokens)
    assert compared > 20


def check_whole_runs(
    engine: Engine,
    propose: Callable[[Sequence[int], int], list[int]],
    received: Received,
    expected: Sequence[tuple[int, ...]],
) -> None:
    """Outputs are as without drafts, and proposals the reference's: also after drafts that were accepted, from a
    prediction, and after such that were not."""
    wrong = [(*tokens[:6], 0, 1, *tokens[6:]) for tokens in expected]
    for predictions in ((), expected, wrong):
        assert run(engine, predictions) == list(expected)
        check(propose, received, expected)
        received.clear()
    stats = engine.stats().speculation
    assert stats is not None
    assert 0 < sum(stats.accepted) < sum(stats.verified)


def drawn(engine: Engine) -> list[tuple[int, ...]]:
    """Outputs for PROMPTS that are drawn with a seed."""
    return [done.token_ids for done in engine.generate(PROMPTS, DRAWN)]
