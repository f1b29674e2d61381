"""How the service turns texts into tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.config import EngineConfig
from engine.core.errors import InvalidRequestError
from engine.core.parsers import Parser, Templates
from engine.core.protocols import json_size
from engine.core.types import SamplingParams
from engine.server.front_end.errors import ApiError
from engine.server.front_end.phase_times import PhaseTimes
from engine.server.http.request_bodies import Message
from engine.server.http.service import LONG_TOKEN_CHARS, THREAD_CHARS, Service
from engine.server.shared.messages import Started

MAX_LEN = 2048


class CountingTokenizer:
    """One token per character; counts the characters that were tokenized."""

    separators = None
    templates = Templates()

    def __init__(self) -> None:
        self.chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.chars += len(text)
        return [0] * len(text)

    def exceeds(self, text: str, max_tokens: int) -> bool:
        return len(text) > max_tokens

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        return "".join(message["content"] for message in messages) + variables.get("end", "")


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer()


@pytest.fixture
def service(tokenizer: CountingTokenizer, fake_config: Callable[..., EngineConfig]) -> Service:
    started = Started(
        cache=cast("Any", None), choices=(), max_len=MAX_LEN, vocab_size=1, default_params=SamplingParams(), seconds=0.0
    )
    client = SimpleNamespace(phases=PhaseTimes(), traced=lambda _, work: work)
    return Service(fake_config(), cast("Any", client), cast("Any", tokenizer), started, 0)


class StrictTokenizer(CountingTokenizer):
    """Its template iterates over the arguments of calls; the text "refused" it never takes."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
        if any(isinstance(arguments, str) for arguments in calls) or messages[0]["content"] == "refused":
            raise InvalidRequestError("the chat template rejects this conversation", "messages")
        return "".join(f"{name}={value};" for arguments in calls for name, value in arguments.items())


@pytest.mark.parametrize("tokenizer", [StrictTokenizer()])
def test_a_conversation_goes_on_after_a_call_that_was_cut_short(service: Service) -> None:
    def encoded(arguments: str, content: str = "a") -> str:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return asyncio.run(service.encode_conversation(messages)).text

    assert encoded('{"a": 1, "b": 2') == "a=1;"
    assert encoded('{"a": 1, "b": 2}') == "a=1;b=2;"
    assert encoded("x") == ""
    for arguments in ("x", "{}"):
        with pytest.raises(InvalidRequestError, match="rejects"):
            encoded(arguments, "refused")


def user(content: str) -> Message:
    return Message(role="user", content=content)


def test_texts_are_tokenized_in_order_whatever_their_length(service: Service) -> None:
    lengths = [1, THREAD_CHARS, 3, THREAD_CHARS - 1, 100, THREAD_CHARS + 1] * 20
    tokens = asyncio.run(service.encode_prompts(["x" * length for length in lengths]))
    assert [len(each) for each in tokens] == lengths


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(
    service: Service, tokenizer: CountingTokenizer
) -> None:
    text = "x" * (MAX_LEN * LONG_TOKEN_CHARS + 1)
    for work in (service.encode(text), service.encode_prompts(["x", text]), service.encode_chat([user(text)])):
        with pytest.raises(ApiError, match=f"context holds {MAX_LEN} tokens") as caught:
            asyncio.run(work)
        assert caught.value.code == "context_length_exceeded"
    assert tokenizer.chars <= 1


def test_a_chat_of_more_messages_than_the_context_has_tokens_is_refused(service: Service) -> None:
    with pytest.raises(ApiError, match="the chat has 2049 messages") as caught:
        asyncio.run(service.encode_chat([user("")] * (MAX_LEN + 1)))
    assert caught.value.param == "messages"
    assert asyncio.run(service.encode_chat([user("x")] * MAX_LEN)).tokens == (0,) * MAX_LEN


def test_streams_get_their_turns_while_prompts_are_tokenized(service: Service) -> None:
    async def main() -> int:
        work = asyncio.ensure_future(service.encode_prompts(["x" * 8191] * 256))
        turns = 0
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        assert len(work.result()) == 256
        return turns

    assert asyncio.run(main()) >= 256 * 8191 // 2**16


def test_only_long_work_runs_in_a_thread(service: Service) -> None:
    def on_loop(*values: object, least: int = 0) -> bool:
        return asyncio.run(service.work(threading.current_thread, least, *values)) is threading.current_thread()

    text = "x" * THREAD_CHARS
    assert on_loop({"a": ["x"] * 10, "b": None}, ["y"])
    assert on_loop(text[:5000])
    for long in (text, [text], {"a": {text: 1}}, [["x"] * THREAD_CHARS], [1] * THREAD_CHARS):
        assert not on_loop("x", long)
    assert not on_loop(text[:5000], text[:5000])
    assert not on_loop("x", least=THREAD_CHARS)


def test_the_size_of_values_is_counted_no_further_than_to_the_limit() -> None:
    assert json_size([{"key": "text", "other": [1, None]}], 1000) in range(20, 60)

    class Untouched(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("read beyond the limit")

    assert json_size(Untouched(range(100)), 100) >= 100
    assert json_size([Untouched(range(50))] * 1000, 52) >= 52


def test_service_knows_the_chat_template_without_the_constructor_of_a_parsers_base(
    tokenizer: CountingTokenizer, service: Service
) -> None:
    class Bare(Parser[None]):
        def __init__(self, options: None, templates: Templates) -> None:
            pass

        @classmethod
        def recognizes(cls, templates: Templates) -> bool:
            return True

        def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> None:
            return None

    templates = Templates(chat="{{ messages }}")
    tokenizer.templates = templates
    service.parser = Bare(None, templates)
    assert service.chat_template == templates.chat
