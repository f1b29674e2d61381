"""openai-python: chat, `.parse`, the streaming helpers, responses."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from servers import KEY, Scripts, Server

CLIENT = "openai-python"
PACKAGE = "openai"

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def client(scripted: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=scripted.v1, api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.shows("chat", "usage")
def test_chat(client: openai.OpenAI, script: Scripts) -> None:
    word = script("Hello there.")
    made = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": f"Hello {word}"}])
    assert made.choices[0].message.content == "Hello there."
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
