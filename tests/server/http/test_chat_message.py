"""A choice's message, and the output that it is made of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Malformed, Parsing, Reasoning
from engine.core.protocols import ApiError
from engine.server.http.chat_message import ChatMessage
from engine.server.http.parsed_output import ParsedOutput

ONE = [CallBegin("f"), CallArguments('{"a"'), CallArguments(": 1}"), CallEnd()]
TWO = [CallBegin("g", "own"), CallArguments("{}"), CallEnd()]


PATCH: list[Event] = [CallBegin("patch"), CallArguments('{"input": "rm -r a'), CallArguments("\\n")]
AT_END = Malformed("the output ended", at_end=True)


def message(events: Sequence[Event]) -> ChatMessage:
    made = ChatMessage(lambda: "new", custom=frozenset({"patch"}))
    for event in events:
        made.add(event)
    return made


def test_the_parts_of_a_message() -> None:
    assert message([]).body() == {"role": "assistant", "content": "", "refusal": None}
    assert message([Reasoning("a"), Reasoning("b"), Content("c")]).body()["reasoning_content"] == "ab"
    body = message([*ONE, *TWO]).body()
    assert body["content"] is None
    assert [(call["id"], call["function"]) for call in body["tool_calls"]] == [
        ("new", {"name": "f", "arguments": '{"a": 1}'}),
        ("own", {"name": "g", "arguments": "{}"}),
    ]


def test_deltas_number_the_calls_from_0() -> None:
    made = ChatMessage(lambda: "new")
    deltas = [made.delta(event) for event in (*ONE, *TWO)]
    assert [one["tool_calls"][0]["index"] for one in deltas if one] == [0, 0, 0, 1, 1]
    assert deltas[1] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}


@pytest.mark.parametrize(
    ("events", "reason", "wanted"),
    [
        (ONE, "stop", "tool_calls"),
        (ONE, "length", "length"),
        (ONE, None, None),
        (ONE[:-1], "stop", "stop"),
        ([*ONE[:-1], *TWO], "stop", "tool_calls"),
        ([Content("x")], "stop", "stop"),
    ],
)
def test_only_a_complete_call_finishes_with_tool_calls(
    events: list[Event], reason: str | None, wanted: str | None
) -> None:
    assert message(events).finish_reason(reason) == wanted


BROKEN: list[tuple[list[Event], str]] = [
    ([*PATCH, Malformed("wrong"), Content("\\d")], "stop"),
    ([*PATCH, Malformed("wrong"), Content("\\d")], "length"),
    ([*PATCH, Content("\\d")], "stop"),
    ([*PATCH, AT_END], "stop"),
    (PATCH, "stop"),
]


@pytest.mark.parametrize(("events", "reason"), BROKEN)
def test_a_call_of_a_custom_tool_is_content_when_it_breaks(events: list[Event], reason: str) -> None:
    made = message([Content("a "), *ONE, *events])
    made.end(reason, streamed=False)
    body = made.body()
    assert body["content"].removesuffix("\\d") == 'a {"name": "patch", "arguments": {"input": "rm -r a\\n'
    assert [call["function"]["name"] for call in body["tool_calls"]] == ["f"]


@pytest.mark.parametrize(("events", "reason"), BROKEN)
def test_a_stream_fails_when_a_call_of_a_custom_tool_breaks(events: list[Event], reason: str) -> None:
    def run() -> None:
        made = message([])
        for event in events:
            made.delta(event)
        made.end(reason, streamed=True)

    with pytest.raises(ApiError, match=r"the call of 'patch'.*(wrong|the output ended).*; do not run it") as raised:
        run()
    assert raised.value.status == 500


def test_a_stream_says_which_stop_string_is_in_a_call_of_a_custom_tool() -> None:
    made = message([])
    for event in PATCH:
        made.delta(event)
    with pytest.raises(ApiError, match=r"the stop string 'rm' is in it.*again without this stop string"):
        made.end("stop", streamed=True, stop_string="rm")


def test_a_call_of_a_custom_tool_stays_when_it_is_complete_or_cut_by_the_length() -> None:
    for events, reason, text in (
        ([*PATCH, CallArguments('"}'), CallEnd()], "stop", "rm -r a\n"),
        ([*PATCH, AT_END], "length", "rm -r a\n"),
        (PATCH, "length", "rm -r a\n"),
    ):
        made, streamed = message(events), message([])
        made.end(reason, streamed=False)
        [call] = made.body()["tool_calls"]
        assert call["custom"] == {"name": "patch", "input": text}
        deltas = [found["tool_calls"][0] for event in events if (found := streamed.delta(event))]
        streamed.end(reason, streamed=True)
        assert "".join(one["custom"]["input"] for one in deltas) == text


def test_a_function_call_keeps_its_arguments_when_it_breaks() -> None:
    events = [*ONE[:-1], Malformed("wrong"), Content("x")]
    made, streamed = message(events), message([])
    made.end("stop", streamed=False)
    assert made.body()["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert sum(streamed.delta(event) is not None for event in events) == 4
    streamed.end("stop", streamed=True)


def test_each_error_is_said_once() -> None:
    assert message([Malformed("a"), Content("x"), Malformed("b"), Malformed("a")]).error == {"parse_error": "a; b"}
    assert message(ONE).error == {}


class Scripted(Parsing):
    """Gives the events of each piece of text by name; `r` ends within reasoning."""

    EVENTS = {"r": [Reasoning("r")], "1": ONE, "12": [*ONE, *TWO], "e": [Content("e")]}  # noqa: RUF012

    def __init__(self) -> None:
        self.last = ""

    @property
    def reasoning(self) -> bool:
        return self.last == "r"

    def feed(self, text: str) -> Sequence[Event]:
        self.last = text
        return self.EVENTS[text]

    def end(self) -> Sequence[Event]:
        return self.EVENTS["e"]


def test_an_output_counts_its_reasoning() -> None:
    output = ParsedOutput(Scripted(), one_call=False, owner="parser")
    assert output.feed("r", 2) == [Reasoning("r")]
    assert output.feed("", 1) == [], "a token without text is reasoning too"
    assert output.feed("12", 5) == [*ONE, *TWO]
    assert output.reasoning_tokens == 3
    assert output.end() == [Content("e")]
    assert output.end() == output.feed("r", 1) == []


def test_an_output_of_one_call_ends_with_that() -> None:
    output = ParsedOutput(Scripted(), one_call=True, owner="parser")
    assert output.feed("r", 1) == [Reasoning("r")]
    assert not output.ended
    assert output.feed("12", 1) == ONE
    assert output.ended
    assert output.feed("r", 1) == output.end() == []
