"""/v1/responses over HTTP: OpenAI's client against a real server whose model says what the input asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import httpx
import openai
import pydantic
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

MODEL = "tiny"
TOOLS: Any = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}
    for name in ("weather", "time")
]
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edit files."}
ROME = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
EDIT = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\" \\ud83d\\ude00 \\u00e9"}}\n</tool_call>'
WRONG = '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>'
THOUGHT = f"<think>\nhm\n</think>\n\nsunny\n{CALL}"


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


def respond(client: openai.OpenAI, said: str, **body: Any) -> Any:
    """A response whose model says a text."""
    return client.responses.create(model=MODEL, input=f"say {said}", **body)


def streamed(client: openai.OpenAI, said: str, **body: Any) -> tuple[Any, list[Any]]:
    """The response that OpenAI's client makes of a stream, and the events as the server sends them."""
    events = list(client.responses.create(model=MODEL, input=f"say {said}", stream=True, **body))
    with client.responses.stream(model=MODEL, input=f"say {said}", **body) as stream:
        response = stream.until_done()._state._completed_response
    return response, events


def comparable(response: Any) -> Any:
    """What two responses to the same request have in common: all but ids and times."""
    found = response.model_dump(mode="json", warnings=False)
    for item in found["output"]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}[item["type"]]
        assert item.pop("id").startswith(f"{prefix}_")
        if "call_id" in item:
            assert item.pop("call_id").startswith("call_")
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return {key: value for key, value in found.items() if key not in ("id", "created_at", "completed_at")}


def test_a_text_is_answered_with_a_message(client: openai.OpenAI) -> None:
    response = respond(client, "Hello.", metadata={"a": "b"}, store=False, instructions="Be kind.")
    assert response.output_text == "Hello."
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.object, response.model, response.store) == ("response", MODEL, False)
    assert (response.instructions, response.metadata, response.tools) == ("Be kind.", {"a": "b"}, [])
    assert (response.temperature, response.top_p, response.tool_choice) == (1.0, 1.0, "auto")
    usage = response.usage
    assert usage.input_tokens == len("<system>Be kind.<user>say Hello.<assistant>")
    assert usage.output_tokens == len("Hello.") + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (2, 0)


def test_the_server_says_that_it_stores_nothing(client: openai.OpenAI) -> None:
    assert respond(client, "x").store is False


@pytest.mark.parametrize(
    "said", ["", "It is sunny.", CALL, f"Let me see.\n{CALL}\n{TIME}", WRONG, THOUGHT, EDIT, f"{CALL} and {EDIT} then"]
)
def test_a_stream_says_the_same(client: openai.OpenAI, said: str) -> None:
    given: Any = {"tools": [*TOOLS, PATCH]}
    whole = respond(client, said, **given)
    joined, events = streamed(client, said, **given)
    assert comparable(joined) == comparable(whole) == comparable(events[-1].response)
    check_stream(events)


def check_stream(events: list[Any]) -> None:
    """Check the order of the events, and that deltas, ends of items and the last response agree."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0].response.output == []
    last = events[-1].response
    assert {event.response.id for event in (events[0], events[-1])} == {last.id}
    inner = events[2:-1]
    assert [event.output_index for event in inner] == sorted(event.output_index for event in inner)
    for index, item in enumerate(last.output):
        own = [event for event in inner if event.output_index == index]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert own[-1].item == item
        assert own[0].item.id == item.id
        assert own[0].item.status == "in_progress"
        assert all(event.item_id == item.id for event in own[1:-1])
        kinds = [event.type.removeprefix("response.") for event in own[1:-1]]
        said = "".join(event.delta for event in own if event.type.endswith(".delta"))
        if item.type in ("message", "reasoning"):
            name = "output_text" if item.type == "message" else "reasoning_text"
            assert (kinds[0], kinds[-1], kinds[-2]) == ("content_part.added", "content_part.done", f"{name}.done")
            assert set(kinds[1:-2]) <= {f"{name}.delta"}
            assert own[1].part.text == ""
            assert all(event.content_index == 0 for event in own[1:-1])
            assert said == own[-3].text == own[-2].part.text == item.content[0].text
        else:
            name, field = (
                ("function_call_arguments", "arguments")
                if item.type == "function_call"
                else ("custom_tool_call_input", "input")
            )
            assert kinds[-1] == f"{name}.done"
            assert set(kinds[:-1]) <= {f"{name}.delta"}
            assert own[0].item.call_id == item.call_id
            assert said == getattr(own[-2], field) == getattr(item, field)


def test_events_come_as_the_text_is_generated(client: openai.OpenAI) -> None:
    _, events = streamed(client, f"sunny {CALL}", tools=TOOLS)
    assert len([one for one in events if one.type == "response.output_text.delta"]) > 2
    assert len([one for one in events if one.type == "response.function_call_arguments.delta"]) > 5


def test_the_events_are_as_openai_sends_them(hermes: Any) -> None:
    response = httpx.post(f"{hermes.url}/v1/responses", json={"model": MODEL, "input": "say x", "stream": True})
    events = response.text.split("\n\n")
    assert events.pop() == ""
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert '"logprobs":[]' in response.text


def test_calls_reach_the_client(client: openai.OpenAI) -> None:
    response = respond(client, f"{CALL}{TIME}", tools=TOOLS)
    first, second = response.output
    assert (first.type, first.name, first.arguments, first.status) == ("function_call", "weather", ROME, "completed")
    assert (second.name, second.arguments) == ("time", "{}")
    assert response.tools[0].name == "weather"
    only = respond(client, f"{CALL}{TIME}", tools=TOOLS, parallel_tool_calls=False)
    assert [one.name for one in only.output] == ["weather"]
    assert only.parallel_tool_calls is False


def test_the_input_of_a_custom_tool_is_a_text(client: openai.OpenAI) -> None:
    [call] = respond(client, EDIT, tools=[PATCH]).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", 'a\n"b" 😀 é')
    wrong = '<tool_call>{"name": "patch", "arguments": {"diff": "a"}}</tool_call>'
    response = respond(client, wrong, tools=[PATCH])
    assert response.output[0].input == '{"diff": "a"}'
    assert "arguments other than the text `input`" in response.parse_error


def test_a_broken_call_of_a_custom_tool_is_text_or_ends_the_stream(client: openai.OpenAI) -> None:
    call = '{"name": "patch", "arguments": {"input": "rm -r a\\d b"}}'
    said = f"<tool_call>{call}</tool_call>"
    response = respond(client, said, tools=[PATCH])
    assert (response.status, response.output_text) == ("completed", call)
    *events, last = client.responses.create(model=MODEL, input=f"say {said}", tools=[PATCH], stream=True)
    assert (last.type, last.response.error.code, last.response.output) == ("response.failed", "server_error", [])
    assert not any(event.type == "response.output_item.done" for event in events)


def test_reasoning_is_an_item_and_goes_back(client: openai.OpenAI) -> None:
    include: Any = ["reasoning.encrypted_content"]
    response = respond(client, THOUGHT, tools=TOOLS, include=include)
    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "hm", [])
    assert (message.content[0].text, call.name) == ("sunny", "weather")
    assert response.usage.output_tokens_details.reasoning_tokens == len("<think>\nhm\n</think>") - len("<think") - 1
    plain = respond(client, THOUGHT, tools=TOOLS).output[0]
    assert plain.encrypted_content is None
    carried = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": reasoning.encrypted_content}
    lengths = []
    for item in (plain.model_dump(exclude_none=True), carried):
        turns: Any = [item, {"role": "assistant", "content": "sunny"}, {"role": "user", "content": "say x"}]
        lengths.append(client.responses.create(model=MODEL, input=turns).usage.input_tokens)  # type: ignore[union-attr]
    said = json.dumps({"reasoning_content": "hm"})
    assert lengths == [len(f"<assistant>sunny{said}<user>say x<assistant>")] * 2


@pytest.mark.parametrize("summary", ["auto", "detailed"])
def test_reasoning_is_its_own_summary_where_one_is_asked_for(client: openai.OpenAI, summary: Any) -> None:
    asked: Any = {"summary": summary}
    for response in (respond(client, THOUGHT, reasoning=asked), streamed(client, THOUGHT, reasoning=asked)[0]):
        reasoning = response.output[0]
        assert ([part.text for part in reasoning.summary], reasoning.content) == (["hm"], None)
        assert response.reasoning.summary == summary
    events = [event for event in streamed(client, THOUGHT, reasoning=asked)[1] if "reasoning" in event.type]
    assert [event.type.removeprefix("response.reasoning_summary_") for event in events] == [
        "part.added",
        *["text.delta"] * (len(events) - 3),
        "text.done",
        "part.done",
    ]
    assert {event.summary_index for event in events} == {0}
    assert "".join(event.delta for event in events[1:-2]) == events[-2].text == events[-1].part.text == "hm"


def test_a_conversation_with_tools_goes_back_and_forth(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": f"say {THOUGHT}"}]
    response = client.responses.create(model=MODEL, input=items, tools=[*TOOLS, PATCH])
    items += response.output
    call = response.output[-1]
    assert call.type == "function_call"
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    items.append({"role": "user", "content": f"say {EDIT}"})
    response = client.responses.create(model=MODEL, input=items, tools=[*TOOLS, PATCH])
    items += response.output
    [edit] = response.output
    assert edit.type == "custom_tool_call"
    output = [{"type": "input_text", "text": "do"}, {"type": "input_text", "text": "ne"}]
    items.append({"type": "custom_tool_call_output", "call_id": edit.call_id, "output": output})
    items.append({"role": "user", "content": "say It is sunny."})
    assert client.responses.create(model=MODEL, input=items, tools=[*TOOLS, PATCH]).output_text == "It is sunny."


def test_what_does_not_parse_is_content_and_is_said(client: openai.OpenAI) -> None:
    response = respond(client, WRONG, tools=TOOLS)
    call, message = response.output
    assert (call.status, call.arguments, message.content[0].text) == ("incomplete", '{"city": ', "Rome}}")
    assert response.parse_error == "the arguments of a tool call are not JSON"
    assert not hasattr(respond(client, CALL, tools=TOOLS), "parse_error")


def test_an_output_that_is_cut_short_is_incomplete(client: openai.OpenAI) -> None:
    response = respond(client, CALL, tools=TOOLS, max_output_tokens=50)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    joined, events = streamed(client, "It is sunny.", max_output_tokens=5)
    assert joined is None
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "It is"
    assert events[-1].response.output[0].status == "incomplete"
    check_stream(events)


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    body: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = respond(client, "<think>\nhm\n</think>\n\nsun", **body)
    joined, events = streamed(client, "<think>\nhm\n</think>\n\nsun", **body)
    assert comparable(joined) == comparable(whole)
    logprobs = whole.output[1].content[0].logprobs
    assert "".join(one.token for one in logprobs) == "sun"
    assert [len(one.top_logprobs) for one in logprobs] == [2, 2, 2]
    assert logprobs[0].bytes == [ord("s")]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [one.token for event in deltas for one in event.logprobs] == ["s", "u", "n"]
    shown = respond(client, f"<think>hm</think>sun\n{CALL}", tools=TOOLS, **body).output[1].content[0].logprobs
    assert "".join(one.token for one in shown) == "sun"
    plain = respond(client, "sun", **body | {"top_logprobs": 0}).output[0].content[0].logprobs
    assert [(one.token, one.top_logprobs) for one in plain] == [("s", []), ("u", []), ("n", [])]


@pytest.mark.parametrize(
    "given",
    [
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}},
        {"tools": [*TOOLS, PATCH], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOLS[0]]}},
        {"tools": [TOOLS[0] | {"strict": True}], "text": {"format": {"type": "json_object"}}},
        {"tools": [TOOLS[0], PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}]},
    ],
)
def test_calls_may_be_forced_and_checked(client: openai.OpenAI, given: Any) -> None:
    """tests/server/test_e2e.py has a model that keeps to the grammars."""
    [call] = respond(client, CALL, **given).output
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", ROME)


class City(pydantic.BaseModel):
    name: str
    people: int


def test_structured_outputs_are_parsed(client: openai.OpenAI) -> None:
    said = '{"name": "Rome", "people": 3}'
    response = client.responses.parse(model=MODEL, input=f"say {said}", text_format=City)
    assert response.output_parsed == City(name="Rome", people=3)
    assert cast("Any", response.text).format.name == "City"
    with client.responses.stream(model=MODEL, input=f"say {said}", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Rome", people=3)


def test_tools_that_cannot_be_offered_are_named(client: openai.OpenAI, hermes: Any) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    members = [TOOLS[0], {"type": "web_search"}]
    tools: Any = [
        {"type": "web_search"},
        {"type": "image_generation", "output_format": "png"},
        PATCH | {"format": grammar},
        {"type": "namespace", "name": "sky", "description": "Of the sky.", "tools": members},
        TOOLS[1],
    ]
    said = '<tool_call>{"name": "sky.weather", "arguments": {}}</tool_call>'
    raw = client.responses.with_raw_response.create(model=MODEL, input=f"say {said}", tools=tools)
    skipped = ["web_search", "image_generation", "custom patch", "sky.web_search"]
    assert raw.headers["x-skipped-tools"] == ", ".join(skipped)
    response: Any = raw.parse()
    assert response.skipped_tools == skipped
    assert [tool.type for tool in response.tools] == ["namespace", "function"]
    [call] = response.output
    assert (call.name, call.namespace) == ("weather", "sky")
    assert "tools of type 'image_generation' are not offered to the model" in hermes.errors
    items: Any = [call, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    items.append({"role": "user", "content": "say x"})
    assert client.responses.create(model=MODEL, input=items).output_text == "x"


def test_a_body_as_codex_sends_it(client: openai.OpenAI) -> None:
    function = {"type": "function", "name": "shell", "description": "Run.", "strict": False, "parameters": {}}
    body: Any = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say done"}]},
        ],
        "tools": [function, {"type": "web_search", "external_web_access": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "1f2e",
        "extra_body": {"client_metadata": {"x-codex-installation-id": "a"}},
    }
    with client.responses.with_streaming_response.create(**body) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["content"][0]["text"] == "done"
    length = len("<tool>shell<system>You are a coding agent.\n\nSandbox: none.<user>say done<assistant>")
    assert last["response"]["usage"]["input_tokens"] == length


@pytest.mark.parametrize(
    ("given", "param", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "c"}, "conversation", "stores nothing"),
        ({"background": True}, "background", "stream the response instead"),
        ({"store": True}, "store", "stores nothing"),
        ({"prompt": {"id": "p"}}, "prompt", "stores no prompts"),
        ({"truncation": "auto"}, "truncation", "must be disabled"),
        ({"include": ["more"]}, "include", "'more'"),
        ({"top_logprobs": 1}, "top_logprobs", "allowed only with include"),
        ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs", "from 0 to"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "context holds 4096"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary", "concise"),
        ({"service_tier": "flex"}, "service_tier", "flex"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "low"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "is missing"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, "tool_choice", "none of the functions"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice", "runs no tools itself"),
        ({"tool_choice": "required"}, "tool_choice", "has no tools"),
        ({"tools": [TOOLS[0] | {"name": "a b"}]}, "tools[0].name", "letters"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name", "as of another tool"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "name"),
        ({"tools": [{}]}, "tools[0].type", "is missing"),
        ({"stream_options": {}}, "stream_options", "only with stream"),
        ({"input": []}, "input", "is empty"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]", "send the item itself"),
        ({"input": [{"type": "web_search_call", "id": "1"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "one of system"),
        ({"input": [{"role": "user"}]}, "input[0].content", "a text or a list"),
        ({"input": [{"role": "user", "content": "x", "size": 1}]}, "input[0].size", "leave it out"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "reads no images",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "is missing"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]},
            "input[0].encrypted_content",
            "was not made by this server",
        ),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    client: openai.OpenAI, given: Any, param: str, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        client.responses.create(**{"model": MODEL, "input": "say x"} | given)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled", "service_tier": "auto"},
        {"tools": TOOLS, "tool_choice": "none", "text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"include": ["web_search_call.action.sources"], "prompt_cache_retention": "in_memory", "max_tool_calls": 3},
        {"user": "me", "safety_identifier": "me", "background": False, "top_logprobs": 0, "tools": []},
        {"extra_body": {"top_k": 3, "seed": -1, "stop": "", "cache_salt": "a", "priority": 1}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
)
def test_what_asks_for_nothing_passes(client: openai.OpenAI, given: Any) -> None:
    assert respond(client, "x", **given)


def test_an_unknown_model_and_parameter_are_refused_in_openais_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="other", input="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        respond(client, "x", extra_body={"rhyme": 1})
    assert (unknown.value.code, unknown.value.param) == ("unknown_parameter", "rhyme")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("chat/completions", {"messages": 0, "tools": [{"type": "function", "function": {"name": "weather"}}]}),
        ("responses", {"input": 0, "tools": [{"type": "function", "name": "weather"}]}),
        ("messages", {"messages": 0, "max_tokens": 99, "tools": [{"name": "weather", "input_schema": {}}]}),
    ],
)
def test_a_hang_up_within_a_tool_call_aborts_the_request(
    hermes: Any, path: str, given: dict[str, Any], stream: bool
) -> None:
    def metric(name: str) -> float:
        return cast("float", hermes.metrics()[name])

    aborted = 'engine_requests_finished_total{finish_reason="abort"}'
    before = metric(aborted)
    said = 'say <tool_call>{"name": "weather", "arguments": {"city": "Ro and so on'
    body = {name: [{"role": "user", "content": said}] if value == 0 else value for name, value in given.items()}
    with hermes.asked(body | {"model": MODEL, "stream": stream}, path=path, until=b"weather" if stream else b""):
        hermes.until(lambda: metric("engine_num_requests_running") == 1)
        assert metric(aborted) == before
    hermes.until(lambda: metric(aborted) == before + 1)
    hermes.until(lambda: metric("engine_num_requests_running") == 0)


@pytest.mark.parametrize(
    "asked",
    [
        {"input": "say hi"},
        {"input": [{"role": "user", "content": "say hi"}], "instructions": "Be brief.", "truncation": "disabled"},
        {"input": "say hi", "tools": [*TOOLS, {"type": "web_search"}], "tool_choice": "auto"},
    ],
)
def test_the_count_of_input_tokens_is_that_of_the_response(client: openai.OpenAI, asked: Any) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, **asked)
    assert counted.object == "response.input_tokens"
    usage = client.responses.create(model=MODEL, **asked).usage
    assert usage is not None
    assert counted.input_tokens == usage.input_tokens > 0


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "input"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "extra_body": {"max_output_tokens": 1}}, "max_output_tokens"),
    ],
)
def test_a_count_of_what_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, asked: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(**asked)
    assert caught.value.param == param
