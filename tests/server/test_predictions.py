"""Predicted outputs over HTTP: OpenAI's client, a real server and the demo model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.e2e

DEMO = Path(__file__).resolve().parents[2] / "demo" / "engine-demo"
ENGINE = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()")
MAX_LEN = 256
MESSAGES: Any = [{"role": "user", "content": "Write a function that reads lines, please."}]
ASKED: Any = {"model": "engine-demo", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def server(start_server: Callable[[Sequence[str]], Any]) -> Iterator[Any]:
    flags = ["--model", str(DEMO), "--port", "0", "--kv-memory", "16MiB", "--threads", "1", "--max-len", str(MAX_LEN)]
    # N-grams of 16 tokens seldom repeat in texts as short as these, so that most proposals are of predictions.
    flags += ["--speculator", "ngram", "--speculator-option", "min_n=16", "--speculator-option", "max_n=16"]
    flags += ["--set", "server.health_interval=0"]  # an idle engine computes no steps, which the tests count
    running = start_server([*ENGINE, "serve", *flags, "--draft-length", "fixed"])
    assert running.url, running.errors
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def expected(client: openai.OpenAI) -> str:
    made = client.chat.completions.create(**ASKED)
    assert made.usage is not None
    assert made.usage.completion_tokens == 40
    assert made.usage.completion_tokens_details is not None
    assert made.usage.completion_tokens_details.accepted_prediction_tokens is None
    return made.choices[0].message.content or ""


def predicted(content: Any) -> Any:
    return {"prediction": {"type": "content", "content": content}}


def steps_of(server: Any, client: openai.OpenAI, **given: Any) -> tuple[int, Any]:
    """The steps that an answer of 40 tokens took, and the answer."""
    before = server.metrics()
    made = client.chat.completions.create(**ASKED, **given)
    tokens = before["engine_generation_tokens_total"] + 40
    server.until(lambda: server.metrics()["engine_generation_tokens_total"] == tokens)
    return round(server.metrics()["engine_steps_total"] - before["engine_steps_total"]), made


def counts(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_a_right_prediction_saves_steps_and_a_wrong_one_changes_nothing(
    server: Any, client: openai.OpenAI, expected: str
) -> None:
    plain_steps, _ = steps_of(server, client)
    steps, right = steps_of(server, client, **predicted(expected))
    assert steps <= 15
    assert plain_steps >= 2 * steps
    assert right.choices[0].message.content == expected
    accepted, rejected = counts(right.usage)
    assert accepted >= 25
    assert rejected <= 5
    _, wrong = steps_of(server, client, **predicted(expected.replace("r", "w")))
    assert wrong.choices[0].message.content == expected
    assert counts(wrong.usage)[1] > rejected


def test_predictions_work_with_streams_several_choices_and_stops(client: openai.OpenAI, expected: str) -> None:
    parts = [{"type": "text", "text": expected[:20]}, {"type": "text", "text": expected[20:]}]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, "logprobs": True}
    pieces = list(client.chat.completions.create(**ASKED, **options, **predicted(parts)))
    texts = ["", ""]
    for piece in pieces[:-1]:
        texts[piece.choices[0].index] += piece.choices[0].delta.content or ""
    assert texts == [expected] * 2
    accepted, _ = counts(pieces[-1].usage)
    assert accepted >= 50
    stop = expected[40:50]
    stopped = client.chat.completions.create(**ASKED, **predicted(expected), stop=stop)
    assert stopped.choices[0].message.content == expected[: expected.index(stop)]
    assert stopped.usage is not None
    accepted, _ = counts(stopped.usage)
    assert 0 < accepted < stopped.usage.completion_tokens


@pytest.mark.parametrize(
    "given",
    [
        {"extra_body": {"structured_outputs": {"regex": "[a-z ]{600,900}"}}},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    ],
    ids=["grammar", "penalties"],
)
def test_predictions_save_steps_with_grammars_and_penalties(
    server: Any, client: openai.OpenAI, given: dict[str, Any]
) -> None:
    plain = client.chat.completions.create(**ASKED, **given)
    text = plain.choices[0].message.content or ""
    steps, right = steps_of(server, client, **given, **predicted(text))
    assert right.choices[0].message.content == text
    assert steps <= 20
    assert counts(right.usage)[0] >= 20


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (predicted("so many words " * 1000), "holds 256 tokens"),
        (predicted("so many words " * 150), "holds 256 tokens"),
    ],
    ids=["very long", "too long"],
)
def test_a_prediction_that_cannot_be_followed_is_refused(client: openai.OpenAI, given: Any, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.chat.completions.create(**ASKED, **given)
    assert caught.value.param == "prediction"
