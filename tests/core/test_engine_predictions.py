"""Whole engines and predicted outputs: any prediction leaves the output as it is, and a right one saves steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from engine.core import Engine, SamplingParams
from engine.core.errors import InvalidRequestError
from engine.core.types import Output, Request
from engine.testing.checkpoints import make_checkpoint
from tests.core.told_speculator import Told

PROMPTS = [tuple((7 * row + 3 * column) % 256 for column in range(5 + 13 * row)) for row in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)
    Told.tell({})
    with Engine(
        model=str(path),
        speculator=Told,
        executor__device="cpu",
        cache__memory="8MiB",
        model__max_len=128,
        model__dtype="float32",
        speculator__length="fixed",
        speculator__max_drafts=4,
    ) as made:
        yield made


def run(
    engine: Engine, predictions: Sequence[Sequence[int]], params: SamplingParams = GREEDY
) -> tuple[list[tuple[int, ...]], list[Output]]:
    """The tokens and the last output of each prompt."""
    for number, (prompt, prediction) in enumerate(zip(PROMPTS, predictions, strict=True)):
        engine.add(Request(id=str(number), prompt=prompt, params=params, prediction=tuple(prediction)))
    tokens: dict[str, tuple[int, ...]] = {}
    last: dict[str, Output] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request] = tokens.get(output.request, ()) + output.tokens
            last[output.request] = output
    return [tokens[key] for key in sorted(tokens)], [last[key] for key in sorted(last)]


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[tuple[int, ...]]:
    tokens, last = run(engine, [()] * len(PROMPTS))
    assert [output.prediction_tokens for output in last] == [None] * len(PROMPTS)
    return tokens


def test_a_right_prediction_saves_steps(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    before = engine.stats().steps
    tokens, last = run(engine, expected)
    assert tokens == expected
    assert engine.stats().steps - before <= 2 + -(-19 // 5)
    assert [output.prediction_tokens for output in last] == [(15, 0)] * len(PROMPTS)


def test_a_wrong_prediction_is_rejected(engine: Engine, expected: list[tuple[int, ...]]) -> None:
    wrong = [(one[0], *((token + 1) % 256 for token in one[1:])) for one in expected]
    tokens, last = run(engine, wrong)
    assert tokens == expected
    for output in last:
        assert output.prediction_tokens is not None
        assert output.prediction_tokens[1] >= 4


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_prediction_leaves_the_tokens_as_they_are(
    engine: Engine, expected: list[tuple[int, ...]], data: st.DataObject
) -> None:
    def near(output: tuple[int, ...]) -> list[int]:
        """The output with some parts left out, repeated or replaced."""
        cuts = st.tuples(st.integers(0, 20), st.integers(0, 20), st.lists(st.integers(0, 255), max_size=3))
        found: list[int] = []
        for start, end, replaced in data.draw(st.lists(cuts, max_size=4)):
            found += [*output[min(start, end) : max(start, end)], *replaced]
        return found

    assert run(engine, [near(one) for one in expected])[0] == expected


def test_seeded_tokens_are_those_without_a_prediction(engine: Engine) -> None:
    alone, _ = run(engine, [()] * len(PROMPTS), DRAWN)
    tokens, last = run(engine, alone, DRAWN)
    assert tokens == alone
    assert last[0].prediction_tokens == (15, 0)


def test_a_prediction_with_a_token_beyond_the_vocabulary_is_refused(engine: Engine) -> None:
    asked = Request(id="x", prompt=PROMPTS[0], params=GREEDY, prediction=(1, 10**6))
    with pytest.raises(InvalidRequestError, match="the prediction holds token 1000000") as caught:
        engine.add(asked)
    assert caught.value.parameter == "prediction"
    with pytest.raises(InvalidRequestError, match="prediction must hold token ids, not 'a'"):
        attrs.evolve(asked, prediction=("a",))  # type: ignore[arg-type]
