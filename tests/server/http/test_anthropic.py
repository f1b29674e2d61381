"""Anthropic's Messages API over HTTP: a real server whose model says what the conversation asks for."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

PATH = "/v1/messages"
MODEL = "tiny"
MAX_LEN = 4096
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "time")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
ALL = f"<think>\nwhy\n</think>\n\nI see.\n{CALL}{TIME}"
WRONG = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": x}}</tool_call>'


@pytest.fixture(scope="module")
def api(serve_fake: Serve) -> Iterator[httpx.Client]:
    """A client of a server whose model writes calls as Hermes does."""
    with serve_fake(parser="hermes", options={"max_len": MAX_LEN}, max_body_bytes=100_000, max_stop=2) as server:
        with server.client() as client:
            yield client
        assert server.stop() == 0
        assert "ERROR" not in server.errors


def asked(said: str, **given: Any) -> dict[str, Any]:
    """The body of a request whose answer is a text."""
    return {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": f"say {said}"}]} | given


def whole(api: httpx.Client, said: str, **given: Any) -> dict[str, Any]:
    response = api.post(PATH, json=asked(said, **given))
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; checks that each has its type in the line `event:`."""
    events = []
    for one in text.removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def streamed(api: httpx.Client, said: str, **given: Any) -> dict[str, Any]:
    """The message that a client makes of a stream."""
    response = api.post(PATH, json=asked(said, **given, stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    start, *events, end, stop = events_of(response.text)
    assert (start["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    arguments = ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                [(name, text)] = [item for item in event["delta"].items() if item[0] != "type"]
                if name == "partial_json":
                    arguments += text
                else:
                    message["content"][-1][name] += text
            case "content_block_stop" if arguments and end["delta"]["stop_reason"] == "tool_use":
                message["content"][-1]["input"] = json.loads(arguments)
                arguments = ""
    return message | end["delta"] | {"usage": end["usage"]}


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its ids, which are random."""
    assert message["id"].startswith("msg_")
    found = {key: value for key, value in message.items() if key != "id"}
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    return found


def test_an_answer_is_a_message(api: httpx.Client) -> None:
    response = api.post(f"{PATH}?beta=true", json=asked("hello"), headers={"anthropic-version": "2023-06-01"})
    message = response.json()
    assert response.headers["request-id"] == message["id"]
    prompt = len("<user>say hello<assistant>")
    assert comparable(message) == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("said", "given", "kinds", "reason"),
    [
        ("hello", {}, ["text"], "end_turn"),
        ("", {}, [], "end_turn"),
        (
            f"<think>\nwhy\n</think>\n\nI see.\n{CALL}{TIME}",
            {},
            ["thinking", "text", "tool_use", "tool_use"],
            "tool_use",
        ),
        (CALL + TIME, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ["tool_use"], "tool_use"),
        (CALL, {"tool_choice": {"type": "none"}}, ["text"], "end_turn"),
        ("one, two", {"stop_sequences": ["x", ", t"]}, ["text"], "stop_sequence"),
        ("<think>\none, two", {"stop_sequences": [", t"]}, ["thinking"], "stop_sequence"),
        ("one, two", {"max_tokens": 3}, ["text"], "max_tokens"),
        ("<think>\none, two", {"max_tokens": 12}, ["thinking"], "max_tokens"),
    ],
)
def test_a_stream_says_the_same(
    api: httpx.Client, said: str, given: dict[str, Any], kinds: list[str], reason: str
) -> None:
    message = comparable(whole(api, said, tools=TOOLS, **given))
    assert [block["type"] for block in message["content"]] == kinds
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == (", t" if reason == "stop_sequence" else None)
    assert comparable(streamed(api, said, tools=TOOLS, **given)) == message


def test_a_call_is_a_block_with_its_input(api: httpx.Client) -> None:
    message = comparable(whole(api, CALL + TIME, tools=TOOLS))
    assert message["content"] == [
        {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "name": "time", "input": {}},
    ]


def test_a_call_that_is_cut_short_has_its_complete_arguments(api: httpx.Client) -> None:
    message = whole(api, CALL, tools=TOOLS, max_tokens=CALL.index('"}}') - 2)
    [block] = message["content"]
    assert (block["input"], message["stop_reason"]) == ({}, "max_tokens")
    assert "ended within the arguments" in message["parse_error"]


def test_what_does_not_parse_is_text_and_is_said(api: httpx.Client) -> None:
    message = whole(api, "<tool_call>weather</tool_call>", tools=TOOLS)
    assert message["content"] == [{"type": "text", "text": "<tool_call>weather</tool_call>"}]
    assert "no call that can be read" in message["parse_error"]
    message = whole(api, WRONG, tools=TOOLS)
    assert "".join(block["text"] for block in message["content"]) == WRONG[len("<tool_call>") : -len("</tool_call>")]
    assert message["stop_reason"] == "end_turn"


def test_a_stream_ends_with_an_error_when_a_call_has_begun_that_does_not_parse(api: httpx.Client) -> None:
    response = api.post(PATH, json=asked(WRONG, tools=TOOLS, stream=True))
    *events, error = events_of(response.text)
    assert events[-1]["type"] == "content_block_delta"
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert "the call of 'weather', a part of which was sent, cannot be completed" in error["error"]["message"]


def test_reasoning_that_is_omitted_comes_back_in_the_next_turn(api: httpx.Client) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    said = "<think>\nwhy\n</think>\n\nsunny"
    message = whole(api, said, thinking=thinking)
    assert comparable(streamed(api, said, thinking=thinking)) == comparable(message)
    block = message["content"][0]
    assert (block["type"], block["thinking"]) == ("thinking", "")
    shown = {"type": "thinking", "thinking": "why", "signature": "engine/1"}
    counts = [
        count(api, [{"role": "assistant", "content": [block, *message["content"][1:]]}])
        for block in (block, shown, {"type": "redacted_thinking", "data": "x"})
    ]
    assert counts[0] == counts[1] == counts[2] + len('{"reasoning_content": "why"}')


def count(api: httpx.Client, between: list[dict[str, Any]]) -> int:
    """The tokens of a conversation with messages between two of the user."""
    user = [{"role": "user", "content": "x"}]
    response = api.post(f"{PATH}/count_tokens", json={"model": MODEL, "messages": user + between + user})
    assert response.status_code == 200, response.text
    found: int = response.json()["input_tokens"]
    return found


def test_a_conversation_with_tools_goes_back_and_forth(api: httpx.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": f"say {CALL}{TIME}"}]}]
    answer = api.post(PATH, json=asked("", messages=messages, tools=TOOLS)).json()
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "sunny"}]}
        for block in answer["content"]
    ]
    said = {"type": "text", "text": "say It is sunny."}
    messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [*results, said]}]
    answer = api.post(PATH, json=asked("", messages=messages, tools=TOOLS)).json()
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": "It is sunny."}], "end_turn")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"system": "Be kind.", "tools": TOOLS},
        {"system": [{"type": "text", "text": "Be kind."}], "tools": TOOLS, "tool_choice": {"type": "none"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
    ],
)
def test_the_count_of_tokens_is_that_of_the_request(api: httpx.Client, given: dict[str, Any]) -> None:
    usage = whole(api, "x", **given)["usage"]
    body = asked("x", **given)
    del body["max_tokens"]
    response = api.post(f"{PATH}/count_tokens?beta=true", json=body)
    assert response.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_what_a_coding_agent_sends_is_accepted(api: httpx.Client) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    body = asked("") | {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.69; cch=1;"},
            {"type": "text", "text": "You are an agent.", **mark},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>a</system-reminder>"}]},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "say hello", **mark}]},
        ],
        "tools": [
            *(tool | {"description": "d", "eager_input_streaming": True} for tool in TOOLS),
            {"name": "later", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True},
        ],
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_1_account_2_session_3"},
        "diagnostics": {"previous_message_id": "msg_1"},
        "temperature": 1,
        "stream": True,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,effort-2025-11-24",
        "x-app": "cli",
    }
    response = api.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert response.status_code == 200, response.text
    start, *_ = events_of(response.text)
    assert start["message"]["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
    assert "x-parameters-without-effect" not in response.headers


def test_parameters_without_effect_are_named(api: httpx.Client) -> None:
    budget = {"type": "enabled", "budget_tokens": 1024}
    response = api.post(PATH, json=asked("x", thinking=budget, max_tokens=2000))
    assert response.headers["x-parameters-without-effect"] == "thinking.budget_tokens"


def test_max_tokens_may_be_more_than_the_context_holds(api: httpx.Client) -> None:
    messages = [{"role": "user", "content": "x" * (MAX_LEN - 40)}]
    message = whole(api, "", messages=messages, max_tokens=32000)
    room = MAX_LEN - len("<user><assistant>") - (MAX_LEN - 40)
    assert (message["usage"]["output_tokens"], message["stop_reason"]) == (room, "model_context_window_exceeded")


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(api: httpx.Client) -> None:
    for length in (MAX_LEN, 20 * MAX_LEN):
        response = api.post(PATH, json=asked("x" * length))
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"max_tokens": None}, "max_tokens: expected int, got null"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"mine": 1}, "mine is not a parameter of this server"),
        ({"speed": "fast"}, "speed is 'fast'; it must be standard"),
        ({"container": "c"}, "container is not supported"),
        ({"stop_sequences": ["a", "b", "c"]}, "stop_sequences: "),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "must not end with a message of the assistant"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] is of type 'image'"),
        ({"system": [{"type": "image"}]}, "system[0] is of type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is of type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "edits[0].keep is missing"),
        ({"mcp_servers": [{}]}, "mcp_servers: "),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(api: httpx.Client, given: dict[str, Any], reason: str) -> None:
    response = api.post(PATH, json=asked("x", **given))
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert reason in error["error"]["message"]


def test_errors_of_every_kind_have_anthropics_shape(api: httpx.Client) -> None:
    for path in (PATH, f"{PATH}/count_tokens"):
        missing = {"model": "other", "messages": [{"role": "user", "content": "x"}]}
        responses = [
            (400, "invalid_request_error", api.post(path, content=b"{")),
            (404, "not_found_error", api.post(path, json=missing | ({"max_tokens": 1} if path == PATH else {}))),
            (413, "request_too_large", api.post(path, json=asked("x" * 100_000))),
            (405, "invalid_request_error", api.get(path)),
        ]
        for status, kind, response in responses:
            assert response.status_code == status
            assert response.json().keys() == {"type", "error", "request_id"}
            assert response.json()["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
            assert response.json()["error"].keys() == {"type", "message"}
            assert response.json()["error"]["type"] == kind
    assert api.post("/v1/messages/batches", json={}).status_code == 404


def test_a_thread_is_refused_in_the_words_after_which_clients_do_without(api: httpx.Client) -> None:
    error = api.post(PATH, json=asked("x", thread={"type": "create"})).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"]["error_code"] == "thread_unsupported_request"


def test_a_body_that_breaks_off_gets_an_error_of_this_shape(api: httpx.Client) -> None:
    url = api.base_url
    head = f"POST {PATH} HTTP/1.1\r\nHost: {url.host}\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(b"no size\r\n")
        with connection.makefile("rb") as answer:
            status, head, body = answer.readline(), *answer.read().partition(b"\r\n\r\n")[::2]
    assert status.split()[1] == b"400"
    assert f"request-id: {json.loads(body)['request_id']}\r\n".encode() in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_keys_limits_and_failures_of_streams(serve_fake: Serve, tmp_path: Path) -> None:
    """On a server that sends the first token of an answer and no other."""
    gate = tmp_path / "gate"
    gate.touch()
    settings: Any = {"api_key": ("first", "second"), "rate_limit": 2, "request_timeout": 0.5}
    with serve_fake(options={"hold": str(gate)}, **settings) as server, server.client() as client:
        body = asked("x")
        del body["max_tokens"]
        wrong: list[dict[str, str]] = [{}, {"x-api-key": "third"}, {"authorization": "Basic first"}, {"x-api-key": ""}]
        for headers in wrong:
            response = client.post(f"{PATH}/count_tokens", json=body, headers=headers)
            assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
            assert "x-api-key" in response.json()["error"]["message"]
        right: list[dict[str, str]] = [{"x-api-key": "first"}, {"authorization": "Bearer first", "x-api-key": "third"}]
        for headers in right:
            assert client.post(f"{PATH}/count_tokens", json=body, headers=headers).status_code == 200
        stream = client.post(PATH, json=asked("x", stream=True), headers={"x-api-key": "second"})
        *_, last = events_of(stream.text)
        assert (last["type"], last["error"]["type"]) == ("error", "timeout_error")
        whole = client.post(PATH, json=asked("x"), headers={"x-api-key": "second"})
        assert (whole.status_code, whole.json()["error"]["type"]) == (504, "timeout_error")
        limited = client.post(PATH, json=asked("x"), headers={"x-api-key": "second"})
        assert (limited.status_code, limited.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(limited.headers["retry-after"]) > 0
        assert server.stop() == 0
