"""A choice's message, and the output that it is made of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Malformed, Parsing, Reasoning
from engine.server.http.chat_message import ChatMessage
from engine.server.http.parsed_output import ParsedOutput

ONE = [CallBegin("f"), CallArguments('{"a"'), CallArguments(": 1}"), CallEnd()]
TWO = [CallBegin("g", "own"), CallArguments("{}"), CallEnd()]


def message(events: Sequence[Event]) -> ChatMessage:
    made = ChatMessage(lambda: "new")
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
