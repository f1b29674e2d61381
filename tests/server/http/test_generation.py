"""Generation without an engine: how events are built from outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from engine.core.parsers import CallEnd, Content, Event, Parsing, Templates as ModelTemplates
from engine.core.protocols import Delta
from engine.core.types import Output, Request, SamplingParams
from engine.plugins.parsers.tagged import ReasoningOptions, ReasoningTags
from engine.server.front_end.errors import ApiError
from engine.server.front_end.phase_times import PhaseTimes
from engine.server.front_end.request_group import RequestGroup
from engine.server.http import generation as module
from engine.server.http.generation import Generation, Templates
from engine.server.http.parsed_output import OutputFormat
from tests.server.fake_front_end import ByteTokenizer


class GroupOnly:
    """A client whose requests get the outputs that the test puts into the group."""

    def __init__(self) -> None:
        self.aborted: list[int] = []
        self.phases = PhaseTimes()
        self.group = RequestGroup(lambda numbers, *_: self.aborted.extend(numbers), ())

    def submit(self, requests: Sequence[Request], choices: int) -> RequestGroup:
        self.group = RequestGroup(lambda numbers, *_: self.aborted.extend(numbers), range(len(requests) * choices))
        return self.group


@pytest.fixture
def client() -> GroupOnly:
    return GroupOnly()


@pytest.fixture
def generation(client: GroupOnly) -> Iterator[Generation]:
    requests = [Request(id="x", prompt=(1, 2))]
    tokenizer = ByteTokenizer("")
    with Generation(cast("Any", client), cast("Any", tokenizer), requests, choices_per_prompt=3) as generation:
        yield generation


def text_event(choice: int, text: str) -> bytes:
    return f'{choice}:"{text}" '.encode()


def build_events(delta: Delta) -> Iterator[bytes]:
    yield b"<"
    yield f"{delta.choice}{delta.text}".encode()
    yield b"> "


def put(client: GroupOnly, choice: int, tokens: bytes, *, last: bool = False, first: bool = False) -> None:
    full = Output(request="x", tokens=tuple(tokens), finish_reason="length" if last else None)
    client.group.put(choice, tuple(tokens), full if first or last else None)


def take_all(generation: Generation) -> list[bytes]:
    """What each call of `events` returns until none is left."""
    templates = Templates(text_event)
    found = [generation.events(templates, build_events)]
    while generation.behind:
        found.append(generation.events(templates, build_events))
    return found


def fill(client: GroupOnly) -> None:
    for choice in range(3):
        put(client, choice, b"a", first=True)
    for choice in range(3):
        put(client, choice, b"b")
    for choice in range(3):
        put(client, choice, b"c", last=True)


EVENTS = b'<0a> <1a> <2a> 0:"b" 1:"b" 2:"b" <0c> <1c> <2c> '


def test_usage_counts_the_tokens_of_predictions_up_to_a_stop_string(client: GroupOnly) -> None:
    asked = Request(id="x", prompt=(1,), prediction=tuple(b"abcdef"), params=SamplingParams(stop=("d",)))
    with Generation(cast("Any", client), cast("Any", ByteTokenizer("")), [asked], choices_per_prompt=2) as generation:
        assert generation.usage.prediction_tokens == (0, 0)
        for choice, tokens, counts in (
            (0, b"a", (0, 0)),
            (1, b"z", (0, 0)),
            (1, b"z", (0, 3)),
            (0, b"bcdef", (4, 0)),
            (1, b"z", None),
        ):
            output = Output(request="x", tokens=tuple(tokens), prediction_tokens=counts)
            client.group.put(choice, tuple(tokens), output)
        take_all(generation)
        usage = generation.usage
    assert generation.running == {1}
    assert (usage.completion_tokens, usage.prediction_tokens) == (7, (3, 4))
    assert usage.body()["completion_tokens_details"] == {
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 4,
    }


def test_events_are_built_in_one_call_when_there_is_time(
    client: GroupOnly, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", math.inf)
    fill(client)
    assert take_all(generation) == [EVENTS]
    assert generation.finished


def test_events_are_the_same_when_each_call_leaves_off_at_once(
    client: GroupOnly, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", -1.0)
    fill(client)
    calls = take_all(generation)
    assert len(calls) > 10
    assert b"".join(calls) == EVENTS
    assert generation.finished


def test_outputs_that_come_while_it_is_behind_wait_for_no_further_notice(
    client: GroupOnly, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group reports only the first output after a `take`, so a call that ends the backlog must take the others."""
    for choice in range(3):
        put(client, choice, b"a", first=True)
    templates = Templates(text_event)
    monkeypatch.setattr(module, "SLICE_SECONDS", -1.0)
    before = generation.events(templates, build_events)
    assert generation.behind
    monkeypatch.setattr(module, "SLICE_SECONDS", math.inf)
    for choice in range(3):
        put(client, choice, b"b", last=True)
    assert before + generation.events(templates, build_events) == b"<0a> <1a> <2a> <0b> <1b> <2b> "
    assert generation.finished


def test_a_generation_that_is_behind_has_not_finished(
    client: GroupOnly, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", -1.0)
    for choice in range(3):
        put(client, choice, b"a", last=True)
    templates = Templates(text_event)
    while generation.running:
        generation.events(templates, build_events)
    assert generation.behind
    assert not generation.finished


def begin_reasoning() -> Parsing | None:
    return ReasoningTags(ReasoningOptions(), ModelTemplates(chat="</think>")).begin("<think>", ())


def test_further_reasoning_and_content_are_events_of_their_templates(client: GroupOnly) -> None:
    def build(delta: Delta) -> Iterator[bytes]:
        yield b"<" + b"".join(f"{type(event).__name__[0]}{event.text}".encode() for event in delta.said) + b"> "

    def reasoning_event(choice: int, text: str) -> bytes:
        return f'R"{text}" '.encode()

    requests, tokenizer = [Request(id="x", prompt=(1, 2))], ByteTokenizer("")
    reasoning = Templates(reasoning_event)
    form = OutputFormat(begin=begin_reasoning, owner="the parser")
    for reasoning_templates, second in ((reasoning, b'R"b" '), (None, b"<Rb> ")):
        with Generation(cast("Any", client), cast("Any", tokenizer), requests, 1, form) as generation:
            found = []
            put(client, 0, b"z", first=True)
            for piece in (b"a", b"b", b"</think>c", b"d", b"ef"):
                put(client, 0, piece)
                found.append(generation.events(Templates(text_event), build, reasoning_templates))
            put(client, 0, b"g", last=True)
            found.append(generation.events(Templates(text_event), build, reasoning_templates))
        assert found == [b"<Rz> <Ra> ", second, b"<Cc> ", b'0:"d" ', b'0:"ef" ', b"<Cg> "]


@pytest.mark.parametrize(
    "outputs", [[b"ab</think>cd"], [b"ab</think>c", b"d"], [b"a", b"b</think>cd"], [*map(bytes, zip(b"ab</think>cd"))]]
)
def test_usage_is_the_same_when_tokens_come_in_one_output(client: GroupOnly, outputs: list[bytes]) -> None:
    requests, tokenizer = [Request(id="x", prompt=(1, 2))], ByteTokenizer("")
    form = OutputFormat(begin=begin_reasoning, owner="the parser")
    with Generation(cast("Any", client), cast("Any", tokenizer), requests, 1, form) as generation:
        for place, tokens in enumerate(outputs):
            put(client, 0, tokens, first=place == 0, last=place == len(outputs) - 1)
        take_all(generation)
    assert (generation.usage.completion_tokens, generation.usage.reasoning_tokens) == (12, 9)


class CallParsing(Parsing):
    """A call ends at )."""

    reasoning = False

    def feed(self, text: str) -> list[Event]:
        return [CallEnd() if char == ")" else Content(char) for char in text]

    def end(self) -> list[Event]:
        return []


@pytest.mark.parametrize("outputs", [[b"(a)zz"], [b"(", b"a)zz"], [b"(", b"a", b")", b"z", b"z"]])
def test_usage_is_the_same_when_the_only_call_ends_within_an_output(client: GroupOnly, outputs: list[bytes]) -> None:
    requests, tokenizer = [Request(id="x", prompt=(1, 2))], ByteTokenizer("")
    form = OutputFormat(begin=CallParsing, one_call=True, owner="the parser")
    reasons: list[str | None] = []

    def collect(delta: Delta) -> Iterator[bytes]:
        reasons.append(delta.finish_reason)
        yield b""

    with Generation(cast("Any", client), cast("Any", tokenizer), requests, 1, form) as generation:
        for place, tokens in enumerate(outputs):
            put(client, 0, tokens, first=place == 0, last=place == len(outputs) - 1)
        generation.events(None, collect)
    assert (generation.usage.completion_tokens, reasons[-1]) == (3, "stop")
    assert not generation.running


def fail(client: GroupOnly, choice: int) -> None:
    client.group.put(choice, (), Output(request="x", tokens=(), finish_reason="error", error="broken"))


def take_until_failure(generation: Generation) -> bytes:
    """What the calls of `events` return until one raises."""
    templates, failure = Templates(text_event), ""
    found = generation.events(templates, build_events)
    try:
        while generation.behind:
            found += generation.events(templates, build_events)
    except ApiError as error:
        failure = str(error)
    assert failure == "broken"
    return found


@pytest.mark.parametrize("seconds", [math.inf, -1.0])
def test_events_before_a_failure_are_returned_when_it_comes_with_them(
    client: GroupOnly, generation: Generation, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", seconds)
    put(client, 0, b"a", first=True)
    put(client, 0, b"b")
    put(client, 1, b"a", last=True)
    fail(client, 0)
    assert take_until_failure(generation) == b'<0a> 0:"b" <1a> '
    assert not generation.finished


def test_events_before_the_failure_of_the_engine_are_returned_when_they_wait(
    client: GroupOnly, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", -1.0)
    put(client, 0, b"a", first=True)
    before = generation.events(Templates(text_event), build_events)
    assert generation.behind
    client.group.fail(ApiError(503, "broken"))
    monkeypatch.setattr(module, "SLICE_SECONDS", math.inf)
    assert before + take_until_failure(generation) == b"<0a> "


def test_a_failure_is_raised_immediately_when_it_comes_first(client: GroupOnly, generation: Generation) -> None:
    fail(client, 0)
    with pytest.raises(ApiError, match="broken"):
        generation.events(Templates(text_event), build_events)
    assert not generation.behind


def test_leaving_aborts_the_running_choices_together(client: GroupOnly, generation: Generation) -> None:
    put(client, 1, b"a", last=True)
    generation.__exit__(None, None, None)
    assert client.aborted == [0, 2]


class EndingParsing(Parsing):
    """Says who has ended the output."""

    reasoning = False

    def feed(self, text: str) -> list[Event]:
        return []

    def end(self) -> list[Event]:
        return [Content("cut")]

    def end_by_model(self) -> list[Event]:
        return [Content("by the model")]


@pytest.mark.parametrize(
    ("reason", "text", "ended"), [("stop", b"a", "by the model"), ("length", b"a", "cut"), ("stop", b"ax", "cut")]
)
def test_a_parser_knows_who_ended_the_output(client: GroupOnly, reason: Any, text: bytes, ended: str) -> None:
    requests = [Request(id="x", prompt=(1, 2), params=SamplingParams(stop=("x",)))]
    said: list[Event] = []

    def collect(delta: Delta) -> Iterator[bytes]:
        said.extend(delta.said)
        yield b""

    given: Any = (client, ByteTokenizer(""), requests, 1, OutputFormat(begin=EndingParsing, owner="the parser"))
    with Generation(*given) as generation:
        client.group.put(0, tuple(text), Output(request="x", tokens=tuple(text), finish_reason=reason))
        generation.events(None, collect)
    assert said == [Content(ended)]
