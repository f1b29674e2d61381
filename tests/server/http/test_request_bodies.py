from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from starlette.requests import Request
from starlette.types import Message

from engine.core.config import ServerConfig
from engine.core.protocols import NUMBERS_PER_VALUE, surely_fits
from engine.server.front_end.errors import ApiError
from engine.server.http.request_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    check_values,
    decode,
    read,
    read_optional,
)

COMPLETION = {"model": "m", "prompt": "p"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def refusal(kind: type[msgspec.Struct], body: Any) -> ApiError:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    with pytest.raises(ApiError) as caught:
        decode(data, kind)
    assert caught.value.status == 400
    return caught.value


def test_a_completion_body_is_decoded() -> None:
    body = decode(
        msgspec.json.encode(
            COMPLETION | {"logit_bias": {"7": -1}, "temperature": 1, "stream_options": {"include_usage": True}}
        ),
        CompletionBody,
    )
    assert body.logit_bias == {7: -1.0}
    assert body.stream_options is not None
    assert body.stream_options.include_usage


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1, 2], [3]]])
def test_forms_of_a_prompt(prompt: Any) -> None:
    assert decode(msgspec.json.encode(COMPLETION | {"prompt": prompt}), CompletionBody).prompt == prompt


@pytest.mark.parametrize("content", ["def f():", [{"type": "text", "text": "def "}, {"type": "text", "text": "f():"}]])
def test_forms_of_a_prediction(content: Any) -> None:
    body = decode(msgspec.json.encode(CHAT | {"prediction": {"type": "content", "content": content}}), ChatBody)
    assert body.prediction is not None
    assert body.prediction.text == "def f():"


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("def f():", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "tokens", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 1}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": "x", "id": 1}, "prediction.id"),
    ],
)
def test_a_prediction_that_is_none_is_refused(prediction: Any, param: str) -> None:
    assert refusal(ChatBody, CHAT | {"prediction": prediction}).param == param


def test_null_means_not_given() -> None:
    names = set(msgspec.json.schema(ChatBody)["$defs"]["ChatBody"]["properties"]) - {"model", "messages"}
    assert decode(msgspec.json.encode(CHAT | dict.fromkeys(names)), ChatBody).n is None
    options = {"stream_options": {"include_usage": None}}
    assert decode(msgspec.json.encode(COMPLETION | options), CompletionBody).stream_options is not None
    tokenize = dict.fromkeys(("model", "prompt", "messages", "add_special_tokens"))
    assert decode(msgspec.json.encode(tokenize), TokenizeBody).prompt is None
    detokenize = {"tokens": [1], "model": None, "skip_special_tokens": None}
    assert decode(msgspec.json.encode(detokenize), DetokenizeBody).tokens == [1]


def test_values_that_ask_for_nothing_are_accepted() -> None:
    asked = {
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "verbosity": "medium",
        "modalities": ["text"],
        "prompt_cache_retention": "in_memory",
        "service_tier": "auto",
    }
    assert decode(msgspec.json.encode(CHAT | asked), ChatBody).verbosity == "medium"
    completion = decode(msgspec.json.encode(COMPLETION | {"stream_options": asked["stream_options"]}), CompletionBody)
    assert completion.stream_options is not None


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"cut \ud83d", "cut \ufffd"),
        (r"cut \uD83D and more", "cut \ufffd and more"),
        (r"\ude00 cut", "\ufffd cut"),
        (r"\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd"),
        (r"\ud83d\u0041\ud83d\n", "\ufffdA\ufffd\n"),
        (r"\ud83d \\ud83d \\\ud83d\\", "\ufffd \\ud83d \\\ufffd\\"),
        (r"\ud83d\\\ude00", "\ufffd\\\ufffd"),
    ],
)
def test_half_a_surrogate_pair_is_read_as_a_replacement_character(written: str, text: str) -> None:
    body = f'{{"model": "m", "x": null, "prompt": "{written}"}}'.encode()
    assert decode(body, CompletionBody).prompt == text


def test_a_body_that_breaks_off_is_refused_when_it_has_half_a_surrogate_pair() -> None:
    for body in (rb'{"model": "m", "prompt": "\ud83d', b'{"model": "\\ud83d", "prompt": "\\\0"}'):
        assert "not JSON" in refusal(CompletionBody, body).message


def test_an_unknown_field_means_nothing_when_it_is_null() -> None:
    call = {"id": "c", "x": None, "function": {"name": "f", "arguments": "{}", "x": None}, "custom": None}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi", "x": None}, {"role": "assistant", "tool_calls": [call]}],
        "tools": [{"type": "function", "x": None, "function": {"name": "f", "x": None, "parameters": {"x": None}}}],
        "stream_options": {"x": None},
        "logit_bias": {"7": 1},
        "response_format": {"x": None},
        "x": None,
    }
    found = decode(msgspec.json.encode(body), ChatBody)
    assert found.messages[1].tool_calls is not None
    assert found.tools is not None
    assert found.tools[0].function is not None
    assert found.tools[0].function.parameters == {"x": None}, "free JSON is not changed"
    assert found.response_format == {"x": None}
    assert found.logit_bias == {7: 1.0}


@pytest.mark.parametrize(
    ("kind", "body", "param", "words"),
    [
        (ChatBody, CHAT | {"x": None, "y": 0}, "y", "is not a parameter of this server"),
        (ChatBody, CHAT | {"x": None, "functions": [{}]}, "functions", "use tools instead"),
        (CompletionBody, COMPLETION | {"topk": 3}, "topk", "is not a parameter of this server"),
        (CompletionBody, COMPLETION | {"suffix": "x"}, "suffix", "is not supported"),
        (CompletionBody, COMPLETION | {"temperature": "hot"}, "temperature", "expected float"),
        (CompletionBody, COMPLETION | {"n": True}, "n", "expected int"),
        (CompletionBody, COMPLETION | {"n": 1.5}, "n", "expected int"),
        (CompletionBody, COMPLETION | {"logit_bias": {"x": 1}}, "logit_bias", "expected int"),
        (CompletionBody, COMPLETION | {"prompt": 3}, "prompt", "expected str"),
        (CompletionBody, COMPLETION | {"prompt": [1.5]}, "prompt[0]", "expected int"),
        (CompletionBody, COMPLETION | {"priority": 2**31}, "priority", "expected int <"),
        (CompletionBody, {"model": "m"}, "prompt", "is missing"),
        (CompletionBody, {"prompt": "m"}, "model", "is missing"),
        (CompletionBody, COMPLETION | {"stream_options": {"a": 1}}, "stream_options.a", "is not a parameter"),
        (ChatBody, CHAT | {"service_tier": "flex"}, "service_tier", "is 'flex'; it must be auto or default"),
        (ChatBody, CHAT | {"verbosity": "low"}, "verbosity", "is 'low'; it must be medium"),
        (ChatBody, CHAT | {"modalities": ["text", "audio"]}, "modalities[1]", "is 'audio'; it must be text"),
        (ChatBody, CHAT | {"prompt_cache_retention": "24h"}, "prompt_cache_retention", "must be in-memory or"),
        (ChatBody, CHAT | {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", ""),
        (ChatBody, CHAT | {"metadata": {"a": 1}}, "metadata[...]", "expected str"),
        (ChatBody, CHAT | {"functions": [{}]}, "functions", "use tools instead"),
        (ChatBody, CHAT | {"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        (
            ChatBody,
            CHAT | {"messages": [{"role": "user", "content": "", "x": 1}]},
            "messages[0].x",
            "is not a parameter",
        ),
        (CompletionBody, [], None, "expected object"),
        (CompletionBody, b"", None, "not JSON"),
        (CompletionBody, b"{", None, "not JSON"),
        (CompletionBody, b"\xff", None, "not JSON"),
        (CompletionBody, b'{"model": "\xff"}', None, "not JSON"),
        (ChatBody, b'{"response_format":' + b'{"a":' * 100_000, None, "not JSON"),
        (CompletionBody, b'{"model": "m", "prompt": "p", "temperature": 1e999}', "temperature", ""),
    ],
)
def test_refusals_name_the_parameter(kind: type[msgspec.Struct], body: Any, param: str | None, words: str) -> None:
    error = refusal(kind, body)
    assert error.param == param
    assert words in error.message
    if param:
        assert error.message.startswith(param)
    assert error.body()["error"]["type"] == "invalid_request_error"


def check(body: bytes, max_values: int = 100) -> None:
    asyncio.run(check_values(body, max_values))


@pytest.mark.parametrize(
    "value",
    [
        b"[" + b",".join([b"[]"] * 200) + b"]",
        b"[" + b",".join([b"{}"] * 200) + b"]",
        b"[" + b",".join([b'""'] * 200) + b"]",
        b"[" + b",".join([b'"\\\\"'] * 200) + b"]",
        b"[" + b",".join([b"1"] * 200 * NUMBERS_PER_VALUE) + b"]",
        b"{" + b",".join([b'"a":1'] * 200) + b"}",
        b'["' + b"a" * 100_000 + b'",' + b",".join([b"[]"] * 200) + b"]",
    ],
)
def test_a_body_is_refused_when_it_holds_many_small_values(value: bytes) -> None:
    with pytest.raises(ApiError, match=r"server\.max_body_values") as caught:
        check(value)
    assert caught.value.status == 413


@pytest.mark.parametrize("padding", range(8))
def test_what_a_string_contains_does_not_count(padding: int) -> None:
    text = "x" * padding + '[{,"\\' * 40_000  # escapes at the end of each window of the count, at any offset
    check(msgspec.json.encode({"model": "m", "prompt": [text, "\\", text]}))
    check(msgspec.json.encode([1] * 100))


@settings(deadline=None)
@given(
    pieces=st.lists(st.sampled_from([b'"', b"\\", b"[", b"]", b"{", b"}", b",", b"1", b"a"]), max_size=40),
    max_values=st.integers(0, 12),
)
def test_a_body_that_surely_fits_is_not_refused_by_counting(pieces: list[bytes], max_values: int) -> None:
    body = b"".join(pieces)
    if surely_fits(body, max_values):
        check(body, max_values)


def test_a_long_chat_fits_without_being_counted() -> None:
    messages = [{"role": "user", "content": 'print("a", [1, 2])\n' * 300}] * 60
    body = msgspec.json.encode({"model": "m", "messages": messages})
    assert len(body) > 300_000
    assert surely_fits(body, 65536)


def test_the_event_loop_runs_while_values_are_counted() -> None:
    async def main() -> int:
        counting = asyncio.ensure_future(check_values(b"1" * 2**21, 10))
        turns = 0
        while not counting.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(main()) > 10


@pytest.mark.parametrize("reader", [read, read_optional])
def test_an_encoded_body_is_refused_by_the_name_of_its_encoding(reader: Any) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"prompt": "x"}'}

    def request(*encodings: bytes) -> Request:
        headers = [(b"content-encoding", encoding) for encoding in encodings]
        return Request({"type": "http", "path": "/tokenize", "query_string": b"", "headers": headers}, receive)

    for encodings in ((b"gzip",), (b"identity", b"GZip"), (b"identity, gzip",)):
        with pytest.raises(ApiError, match=r"(?i)gzip") as caught:
            asyncio.run(reader(request(*encodings), TokenizeBody, ServerConfig()))
        assert (caught.value.status, caught.value.headers["accept-encoding"]) == (415, "identity")
    for other in (b"Identity", b"utf-8", b""):
        assert asyncio.run(reader(request(other), TokenizeBody, ServerConfig())).prompt == "x"


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    ("reader", "max_bytes", "size", "limit"),
    [
        (read, 2**20, 2**20 + 1, "1048576 bytes (server.max_body_bytes)"),
        (read_optional, 2**20, 2**16 + 1, "65536 bytes (the limit of /start_profile)"),
        (read_optional, 1000, 1001, "1000 bytes (server.max_body_bytes)"),
    ],
)
def test_a_refusal_names_the_limit_that_the_body_exceeds(
    reader: Any, max_bytes: int, size: int, limit: str, declared: bool
) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b" " * size}

    headers = [(b"host", b"localhost"), *([(b"content-length", b"%d" % size)] if declared else [])]
    request = Request({"type": "http", "path": "/start_profile", "query_string": b"", "headers": headers}, receive)
    with pytest.raises(ApiError) as caught:
        asyncio.run(reader(request, TokenizeBody, ServerConfig(max_body_bytes=max_bytes)))
    assert caught.value.status == 413
    assert str(caught.value) == f"the body is larger than {limit}; send a smaller one"
