"""What the output of a conversation may be, by what its parser can describe; and the order in which choices begin."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.grammars import Grammar
from engine.core.parsers import CallArguments, CallBegin, Content, Event, Parser, Templates, ToolChoice
from engine.core.protocols import ApiError, Conversation, Delta, FunctionTool, Usage
from engine.core.types import TokenLogprobs
from engine.plugins.parsers.hermes import Hermes
from engine.plugins.parsers.none import NoParser
from engine.plugins.parsers.tagged import ReasoningOptions
from engine.server.http.chat import ChatWriter
from engine.server.http.chat_message import ChatMessage
from engine.server.http.output_rules import Output, planned_output
from engine.server.http.service import Service
from engine.server.http.tools import offered_tools
from tests.server.fake_front_end import ByteTokenizer


class Plain(Parser[None]):
    """Reads calls, but does not describe its format."""

    api = "1"

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return True

    def begin(self, prompt: str, tools: Any) -> None:
        return None


PLAIN = Plain(None, Templates())
HERMES = Hermes(ReasoningOptions(), Templates(chat="<tool_call>"))
YES = Grammar.choice(["yes"])


def planned(parser: Parser[Any] | None, **given: Any) -> Output:
    tools = [FunctionTool(name="f", strict=given.pop("strict", False)), FunctionTool(name="g")]
    conversation = Conversation(messages=[], **({"tools": tools} | given))
    service = cast("Service", SimpleNamespace(parser=parser, parser_tokens=frozenset(), max_grammar_chars=1000))
    offered = offered_tools(conversation.tools, conversation.tool_choice, readable=True)
    return planned_output(service, conversation, offered, "")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tool_choice": ToolChoice("required")}, "tool_choice"),
        ({"tool_choice": ToolChoice("required", "g")}, "tool_choice"),
        ({"tool_choice": ToolChoice(allowed=frozenset({"g"}))}, "tool_choice"),
        ({"strict": True}, "tools"),
        ({"grammar": YES}, "response_format"),
    ],
)
def test_a_parser_that_does_not_describe_its_format_is_named(given: Any, param: str) -> None:
    with pytest.raises(ApiError, match="the parser Plain does not say how") as caught:
        planned(PLAIN, **given)
    assert caught.value.param == param
    assert planned(HERMES, **given).grammar is not None


def test_a_grammar_that_the_engine_would_refuse_for_its_length_is_not_sent() -> None:
    long = Grammar.choice(["y" * 1000])
    strict = [FunctionTool(name="f", parameters={"enum": ["y" * 1000]}, strict=True)]
    for given, param in (
        ({"grammar": long}, "response_format"),
        ({"grammar": long, "tools": []}, "response_format"),
        ({"tools": strict}, "tools"),
    ):
        with pytest.raises(ApiError, match=r"at most 1000 \(grammar.max_chars\)") as caught:
            planned(HERMES, **cast("Any", given))
        assert caught.value.param == param


def test_such_a_parser_serves_all_else() -> None:
    free = planned(PLAIN)
    assert free.grammar is None
    assert free.format is not None
    content = planned(PLAIN, tools=[], grammar=YES)
    assert (content.grammar, content.format) == (YES, None)
    assert planned(PLAIN, tool_choice=ToolChoice("none"), strict=True, grammar=YES).grammar == YES


def test_what_asks_for_nothing_costs_nothing() -> None:
    for parser in (HERMES, PLAIN, NoParser(None, Templates()), None):
        for given in ({}, {"parallel_calls": False}, {"tool_choice": ToolChoice(allowed=frozenset({"f", "g"}))}):
            assert planned(parser, **given).grammar is None


Chunks = Callable[..., list[tuple[int, Any]]]


def chat_stream(num_choices: int, logprobs: int | None = None) -> Chunks:
    """A stream of chat: chunks(choice, events, finish_reason) are the choice and delta of each chunk of a Delta."""
    service: Any = SimpleNamespace(name="tiny", tokenizer=ByteTokenizer(""))
    writer = ChatWriter(service, "x", [ChatMessage(lambda: "id") for _ in range(num_choices)], None, logprobs)
    entries = [] if logprobs is None else [TokenLogprobs(token=97, logprob=-0.5, rank=1, top=())]

    def chunks(choice: int, events: list[Event] | None, reason: Any = None) -> list[tuple[int, Any]]:
        delta = Delta(choice, logprobs=entries, events=events, finish_reason=reason)
        found = [json.loads(event[len("data: ") :]) for event in writer.events(delta, lambda: Usage(1))]
        return [(one["choices"][0]["index"], one["choices"][0]["delta"]) for one in found]

    return chunks


def test_content_becomes_empty_when_only_log_probabilities_come_before_the_end() -> None:
    begin: Any = {"role": "assistant", "content": None}
    chunks = chat_stream(2, logprobs=0)
    assert chunks(1, []) == [(0, begin), (1, begin), (1, {})]
    assert chunks(0, []) == [(0, {})]
    assert chunks(0, [], "stop") == [(0, {"content": ""}), (0, {}), (0, {})]
    assert chunks(1, [Content("a")]) == [(1, {"content": "a"})]
    assert chunks(1, [], "stop") == [(1, {}), (1, {})]
    assert chat_stream(1, logprobs=0)(0, [], "stop") == [(0, begin | {"content": ""}), (0, {}), (0, {})]
    assert chat_stream(1, logprobs=0)(0, None) == [(0, begin | {"content": ""}), (0, {"content": ""})]


def test_choices_of_a_stream_begin_in_their_order() -> None:
    chunks = chat_stream(3)
    first = chunks(1, [CallBegin("f"), CallArguments("{}")])
    assert [(index, delta.get("role")) for index, delta in first] == [
        (0, "assistant"),
        (1, "assistant"),
        (1, None),
        (1, None),
    ]
    assert first[0][1] == {"role": "assistant", "content": None}
    assert chunks(2, [Content("a")]) == [(2, {"role": "assistant", "content": ""}), (2, {"content": "a"})]
    assert chunks(0, [], "stop") == [(0, {"content": ""}), (0, {})]
    assert chunks(1, [], "stop") == [(1, {})]
