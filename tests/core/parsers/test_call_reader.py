from __future__ import annotations

import pytest

from engine.core.parsers import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Found,
    Malformed,
    SequentialParsing,
    Steps,
    read_call,
)
from engine.core.parsers.call_reader import HELD_CHARS


class OneCall(SequentialParsing):
    """A call, and what follows as content."""

    found: Found

    @property
    def reasoning(self) -> bool:
        return False

    def read(self) -> Steps[None]:
        self.found = yield from read_call(self.source, str.isidentifier)
        yield from self.source.text_until((), lambda text: [Content(text)] if text else [])


def parse(text: str) -> tuple[Found, list[Event]]:
    parsing = OneCall()
    events = [*parsing.feed(text), *parsing.end()]
    return parsing.found, events


def test_arguments_come_as_soon_as_the_name_is_known() -> None:
    parsing = OneCall()
    assert parsing.feed('{"name": "f", "arguments": ') == []
    assert parsing.feed('{"a": ') == [CallBegin("f"), CallArguments('{"a": ')]
    assert parsing.feed("1}") == [CallArguments("1}"), CallEnd()]
    assert parsing.feed("}") == []
    assert parsing.feed(" rest") == [Content(" rest")]


def test_keys_may_come_in_any_order() -> None:
    wanted = [CallBegin("f"), CallArguments('{"a":1}'), CallEnd()]
    for text in (
        '{"parameters": {"a":1}, "name": "f"}',
        '{"id": "x", "type": "function", "name": "f", "arguments": {"a":1}}',
        ' { "name" : "f" , "arguments" : "{\\"a\\":1}" } ',
    ):
        found, events = parse(text)
        assert found is Found.CALL
        assert [event for event in events if not isinstance(event, Content)] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "[]",
        '{"name": 1}',
        '{"name": "not an identifier", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{} x"}',
        '{"name": "f", "city": "Rome"}',
        '{"arguments": {"a": 1}}',
        '{"name": "f" "arguments": {}}',
        '{"arguments": {"a": "' + "x" * HELD_CHARS + '"}, "name": "f"}',
        '{"name": "' + "x" * HELD_CHARS + '"}',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    found, events = parse(text)
    assert found is Found.NOTHING
    assert events == ([Content(text)] if text else [])


def test_what_breaks_a_call_is_said() -> None:
    found, events = parse('{"name": "f", "arguments": {"a": x}}')
    assert found is Found.BROKEN
    assert events == [
        CallBegin("f"),
        CallArguments('{"a": '),
        Malformed("the arguments of a tool call are not JSON"),
        Content("x}}"),
    ]
    found, events = parse('{"name": "f", "arguments": {"a": 1, ')
    assert found is Found.BROKEN
    assert "".join(event.text for event in events if isinstance(event, CallArguments)) == '{"a": 1, '
    assert events[-1] == Malformed("the output ended within the arguments of a tool call", at_end=True)
    found, events = parse('{"name": "f", "arguments": {}')
    assert found is Found.CALL
    assert events[2:] == [CallEnd(), Malformed("a tool call is not closed after its arguments")]
    found, events = parse('{"name": "f", "arguments": {}, "why": "rain"}')
    assert found is Found.CALL
    assert events[3:] == [Malformed("a tool call has the key 'why', which is left out")]


@pytest.mark.parametrize(
    "text", ['{"name": "f", "arguments": {"a": True,},}', '{"arguments": {"a": True}, "name": "f", }']
)
def test_python_in_a_call_is_read_as_json(text: str) -> None:
    found, events = parse(text)
    assert found is Found.CALL
    assert [event for event in events if not isinstance(event, CallArguments)] == [CallBegin("f"), CallEnd()]
    assert "".join(event.text for event in events if isinstance(event, CallArguments)) == '{"a": true}'


def test_megabytes_of_arguments_cost_time_in_proportion() -> None:
    """A value that were held or copied at each piece would take minutes."""
    parsing = OneCall()
    parsing.feed('{"name": "f", "arguments": {"a": "')
    pieces = [event for _ in range(50_000) for event in parsing.feed("x" * 20)]
    assert sum(len(event.text) for event in pieces if isinstance(event, CallArguments)) == 1_000_000
    assert parsing.source.unread == ""
