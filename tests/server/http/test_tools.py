"""Reasoning and tool calls over HTTP: OpenAI's client against a real server whose model says what the chat asks for."""

# ruff: noqa: E501  (a request is one line)

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from typer.testing import CliRunner

from engine.cli.main import app as cli

Serve = Callable[..., AbstractContextManager[Any]]

MODEL = "tiny"
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "time")
]
ROME = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
WRONG = '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>'


@pytest.fixture(scope="module")
def hermes(serve_fake: Serve) -> Iterator[Any]:
    """A server whose model writes calls as Hermes does."""
    with serve_fake(parser="hermes", options={"max_len": 4096}) as server:
        yield server
        assert server.stop() == 0
        assert "ERROR" not in server.errors


@pytest.fixture(scope="module")
def client(hermes: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, said: str, **body: Any) -> Any:
    """The choice of a chat whose model says a text."""
    messages = [{"role": "user", "content": f"say {said}"}]
    return client.chat.completions.create(model=MODEL, messages=cast("Any", messages), **body).choices[0]


def streamed(client: openai.OpenAI, said: str, **body: Any) -> tuple[Any, list[Any]]:
    """The choice that OpenAI's client makes of a stream, and the chunks."""
    messages: Any = [{"role": "user", "content": f"say {said}"}]
    state = ChatCompletionStreamState(input_tools=body.get("tools", openai.omit))
    body |= {"model": MODEL, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**body))
    for chunk in chunks:
        state.handle_chunk(chunk)
    return state.get_final_completion().choices[0], chunks


def comparable(choice: Any) -> Any:
    """A choice without the ids of its calls, which are random, and without what only the stream helper adds."""
    found = choice.model_dump(exclude_none=True, exclude_unset=True)
    for call in found["message"].get("tool_calls") or ():
        assert call.pop("id").startswith("call_")
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    found["message"].pop("parsed", None)
    found.pop("parse_error", None)
    found.pop("logprobs", None)
    return found


def test_a_call_reaches_the_client(client: openai.OpenAI) -> None:
    choice = chat(client, CALL, tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ROME)


def test_an_output_that_matches_a_grammar_is_parsed(client: openai.OpenAI) -> None:
    choice = chat(client, "<think>a</think>{}", response_format={"type": "json_object"})
    assert (choice.message.reasoning_content, choice.message.content) == ("a", "{}")
    choice = chat(client, CALL, tools=TOOLS, response_format={"type": "json_object"})
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"
    assert chat(client, CALL, tools=TOOLS, tool_choice="none").message.content == CALL


WEATHER: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("tool_choice", "reason"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        (WEATHER, "stop"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}}, "tool_calls"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}, "tool_calls"),
    ],
)
def test_the_finish_reason_is_that_of_openai(client: openai.OpenAI, tool_choice: Any, reason: str) -> None:
    choice = chat(client, CALL, tools=TOOLS, tool_choice=tool_choice)
    assert (choice.finish_reason, choice.message.content) == (reason, None)
    joined, _ = streamed(client, CALL, tools=TOOLS, tool_choice=tool_choice)
    assert comparable(joined) == comparable(choice)


PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Change a file."}}


def test_a_broken_call_of_a_custom_tool_is_content_or_ends_the_stream(client: openai.OpenAI) -> None:
    call = '{"name": "patch", "arguments": {"input": "rm -r a\\d b"}}'
    choice = chat(client, f"<tool_call>{call}</tool_call>", tools=[PATCH])
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", call, None)
    assert choice.parse_error == "the arguments of a tool call are not JSON"
    with pytest.raises(openai.APIError, match="the call of 'patch', a part of which was sent, cannot be completed"):
        streamed(client, f"<tool_call>{call}</tool_call>", tools=[PATCH])


def test_a_custom_tool_gets_its_input_as_it_is(client: openai.OpenAI) -> None:
    said = '<tool_call>{"name": "patch", "arguments": {"input": "a\\n\\"b\\" \\ud83e\\udd80 \\\\é"}}</tool_call>'
    choice = chat(client, said, tools=[*TOOLS, PATCH])
    [call] = choice.message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", 'a\n"b" 🦀 \\é')
    asked: Any = [{"role": "user", "content": f"say {said}"}]
    chunks = client.chat.completions.create(model=MODEL, messages=asked, tools=[*TOOLS, PATCH], stream=True)
    deltas = [one for chunk in chunks for one in chunk.choices[0].delta.model_dump().get("tool_calls") or ()]
    assert (deltas[0]["type"], deltas[0]["custom"]) == ("custom", {"name": "patch", "input": ""})
    assert "".join(delta["custom"]["input"] for delta in deltas) == call.custom.input
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    asked += [choice.message, result, {"role": "user", "content": "say ok"}]
    answer = client.chat.completions.create(model=MODEL, messages=asked, tools=[PATCH]).choices[0]
    assert answer.message.content == "ok"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("It is sunny.", "stop"),
        (CALL, "tool_calls"),
        (f"Let me see.\n{CALL}\n{TIME}", "tool_calls"),
        (WRONG, "stop"),
        ("<tool_call>weather</tool_call>", "stop"),
    ],
)
def test_a_stream_says_the_same(client: openai.OpenAI, said: str, reason: str) -> None:
    whole = chat(client, said, tools=TOOLS)
    joined, chunks = streamed(client, said, tools=TOOLS)
    assert whole.finish_reason == reason
    assert comparable(joined) == comparable(whole)
    last = chunks[-2].choices[0]
    assert last.finish_reason == reason
    assert getattr(last, "parse_error", None) == getattr(whole, "parse_error", None)
    assert [bool(chunk.usage) for chunk in chunks][-2:] == [False, True]


@pytest.mark.parametrize("said", ["", " ", "It is sunny.", "<think>\nhm\n</think>", CALL])
def test_a_stream_says_the_same_when_log_probabilities_are_asked_for(client: openai.OpenAI, said: str) -> None:
    whole = chat(client, said, tools=TOOLS, logprobs=True)
    joined, _ = streamed(client, said, tools=TOOLS, logprobs=True)
    assert comparable(joined) == comparable(whole)
    assert joined.logprobs.content == whole.logprobs.content


def test_the_deltas_of_a_call_are_as_openai_sends_them(client: openai.OpenAI) -> None:
    _, chunks = streamed(client, f"{CALL}{TIME}", tools=TOOLS)
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    first = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in first] == [
        (0, "function", {"name": "weather", "arguments": ""}),
        (1, "function", {"name": "time", "arguments": ""}),
    ]
    rest = [call for call in calls if "id" not in call]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
    assert len([call for call in rest if call["index"] == 0]) > 5, "the arguments come as they are generated"
    assert deltas[-1] == {}


def test_what_does_not_parse_is_content_and_is_said(client: openai.OpenAI) -> None:
    choice = chat(client, "<tool_call>weather</tool_call>", tools=TOOLS)
    assert choice.message.content == "<tool_call>weather</tool_call>"
    assert "no call that can be read" in choice.parse_error
    choice = chat(client, WRONG, tools=TOOLS)
    assert choice.message.content == "Rome}}"
    assert choice.message.tool_calls[0].function.arguments == '{"city": '
    assert choice.parse_error == "the arguments of a tool call are not JSON"
    assert not hasattr(chat(client, CALL, tools=TOOLS), "parse_error")


def test_a_call_that_is_cut_short_ends_with_length(client: openai.OpenAI) -> None:
    choice = chat(client, CALL, tools=TOOLS, max_tokens=50)
    assert choice.finish_reason == "length"
    [call] = choice.message.tool_calls
    assert ROME.startswith(call.function.arguments)
    assert "ended within the arguments" in choice.parse_error


@pytest.mark.parametrize("given", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(client: openai.OpenAI, given: Any) -> None:
    assert chat(client, CALL, **given).message.content == CALL


@pytest.mark.parametrize("stream", [False, True])
def test_the_output_ends_with_its_first_call_if_only_one_is_wanted(client: openai.OpenAI, stream: bool) -> None:
    said = f"{CALL}{TIME}"
    given: Any = {"tools": TOOLS, "parallel_tool_calls": False}
    choice = streamed(client, said, **given)[0] if stream else chat(client, said, **given)
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


def test_reasoning_has_a_field_and_tokens_of_its_own(client: openai.OpenAI) -> None:
    said = f"<think>\nhm\n</think>\n\nsunny\n{CALL}"
    choice = chat(client, said, tools=TOOLS)
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "sunny")
    joined, chunks = streamed(client, said, tools=TOOLS)
    assert comparable(joined) == comparable(choice)
    usage = chunks[-1].usage
    assert usage.completion_tokens_details.reasoning_tokens == len("<think>\nhm\n</think>") - len("<think") - 1
    assert usage.completion_tokens == len(said) + 1
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_tools_and_the_effort_reach_the_template(client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": "say x"}]}
    plain = client.chat.completions.create(**body).usage
    more = client.chat.completions.create(**body, tools=TOOLS, reasoning_effort="low").usage
    assert plain is not None
    assert more is not None
    assert more.prompt_tokens - plain.prompt_tokens == len("<tool>weather<tool>time<effort>low")


def test_a_conversation_with_tools_goes_back_and_forth(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": f"say {CALL}"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
    assert answer.tool_calls
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}
    messages += [answer, result, {"role": "user", "content": "say It is sunny."}]
    choice = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("It is sunny.", "stop")


def test_the_command_line_talks_to_the_server(hermes: Any) -> None:
    said = "say <think>hm</think>It is sunny."
    result = CliRunner().invoke(cli, ["chat", "--url", hermes.url, "--temperature", "0"], input=f"{said}\nsay x\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "It is sunny.\nx\n", "hm\n")
    result = CliRunner().invoke(cli, ["chat", "--url", hermes.url, "--min-p", "2"], input="say x\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: the server answered 400: min_p must be in [0, 1], not 2.0\n"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": WEATHER}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": 1}}}, "tool_choice.allowed_tools.tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: A"}}}}]}, "tools[0].custom.format.grammar.syntax"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(client: openai.OpenAI, given: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "x", **given)
    assert caught.value.param == param
