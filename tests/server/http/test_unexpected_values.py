"""Values of unexpected types, anywhere in a request: each is accepted or refused, and none makes the server fail."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]
Path = tuple[str | int, ...]

VALUES = [None, True, 1, -1, 1.5, "", "x", "é", [], {}, [1], {"a": 1}, 10**30]
MAX_CASES = 100
"""Cases of one body; a sample if there are more."""

OPENAI_FIELDS = {"message", "type", "param", "code"}
ANTHROPIC_FIELDS = {"type", "message"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}

CHAT_MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
    {
        "role": "assistant",
        "content": [{"type": "text", "text": "t"}, {"type": "refusal", "refusal": "r"}],
        "reasoning_content": "r",
        "tool_calls": [
            {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"a": "b"}'}},
            {"id": "d", "type": "custom", "custom": {"name": "g", "input": "aa"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "result", "name": "f"},
    {"role": "user", "content": "say hi"},
]
SAMPLING = {
    "temperature": 1.0,
    "top_p": 0.5,
    "logit_bias": {"5": 1.0},
    "seed": 1,
    "stop": ["zz"],
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "min_tokens": 1,
    "stop_token_ids": [1],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "priority": 1,
    "cache_salt": "s",
    "prompt_cache_key": "k",
}
CHAT = SAMPLING | {
    "model": "tiny",
    "messages": CHAT_MESSAGES,
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}},
        {
            "type": "custom",
            "custom": {
                "name": "g",
                "description": "d",
                "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}},
            },
        },
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
    },
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    "max_completion_tokens": 3,
    "n": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"begin": "<assistant>"},
    "reasoning_effort": "low",
    "parallel_tool_calls": True,
    "stream": False,
    "stream_options": None,
    "user": "u",
    "metadata": {"a": "b"},
}
COMPLETION = SAMPLING | {
    "model": "tiny",
    "prompt": ["hello", [1, 2]],
    "max_tokens": 3,
    "echo": True,
    "logprobs": 1,
    "n": 2,
    "best_of": 2,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "structured_outputs": {"regex": "a+"},
}
RESPONSE = SAMPLING | {
    "model": "tiny",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "x",
            "summary": [{"type": "summary_text", "text": "t"}],
            "content": [{"type": "reasoning_text", "text": "t"}],
        },
        {"type": "reasoning", "summary": [], "encrypted_content": "engine-1:aGk="},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "q"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
        {"role": "user", "content": "say hi"},
    ],
    "instructions": "i",
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
        {"type": "namespace", "name": "q", "tools": [{"type": "function", "name": "f"}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "max_output_tokens": 5,
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "top_logprobs": 1,
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "metadata": {"a": "b"},
    "truncation": "disabled",
}
COUNTED_MESSAGE = {
    "model": "tiny",
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "", "signature": "engine/1:aGk="},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "r"}, {"type": "tool_reference", "tool_name": "f"}],
                    "is_error": True,
                },
                {"type": "text", "text": "say hi"},
            ],
        },
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA, "description": "d", "strict": True, "defer_loading": True}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
}
MESSAGE = COUNTED_MESSAGE | {
    "max_tokens": 1025,
    "stop_sequences": ["q"],
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 4,
    "metadata": {"user_id": "u"},
    "stream": True,
}
TOKENIZE = {"model": "tiny", "messages": CHAT_MESSAGES, "prompt": None, "add_special_tokens": None}
DETOKENIZE = {"model": "tiny", "tokens": [1, 2, 3], "skip_special_tokens": True}


@pytest.fixture(scope="module")
def client(serve_fake: Serve) -> Iterator[httpx.Client]:
    """A client of a server that reads tool calls."""
    with serve_fake(parser="hermes", options={"max_len": 4096}) as server:
        with server.client() as client:
            yield client
        assert server.stop() == 0
        assert "ERROR" not in server.errors


def paths(value: Any, before: Path = ()) -> Iterator[Path]:
    """The path of a JSON value, and of each value inside."""
    yield before
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from paths(child, (*before, key))


def replaced(body: Any, path: Path, value: Any) -> Any:
    """A copy of `body` with another value at `path`; the value "é" is added to a text."""
    if not path:
        return f"{body}{value}" if value == "é" and isinstance(body, str) else value
    found = copy.copy(body)
    found[path[0]] = replaced(body[path[0]], path[1:], value)
    return found


def cases(body: Any) -> list[tuple[Path, Any]]:
    """Paths in `body` and values to put there."""
    found = [(path, value) for path in paths(body) for value in VALUES]
    return found if len(found) <= MAX_CASES else random.Random(0).sample(found, MAX_CASES)


def is_error(route: str, body: Any) -> bool:
    """Whether a JSON body is an error in the shape of the route's protocol."""
    if route.startswith("/v1/messages"):
        return set(body) == {"type", "error", "request_id"} and set(body["error"]) == ANTHROPIC_FIELDS
    return set(body) == {"error"} and set(body["error"]) == OPENAI_FIELDS


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/responses", RESPONSE),
        ("/v1/messages", MESSAGE),
        ("/v1/messages/count_tokens", COUNTED_MESSAGE),
        ("/tokenize", TOKENIZE),
        ("/detokenize", DETOKENIZE),
    ],
)
def test_a_value_of_any_type_is_accepted_or_refused(client: httpx.Client, route: str, body: Any) -> None:
    assert client.post(route, json=body).status_code == 200
    wrong = []
    for path, value in cases(body):
        response = client.post(route, json=replaced(body, path, value))
        if response.status_code == 200:
            fine = "internal server error" not in response.text
        else:
            fine = 400 <= response.status_code < 500 and is_error(route, response.json())
        if not fine:
            wrong.append((path, value, response.status_code, response.text[:200]))
    assert not wrong
