"""Vercel AI SDK: generateText, streamText, generateObject, streamObject, tools; by each of its providers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from node_clients import runner
from samples import PERSON_JSON, Person
from servers import Scripts, Server, call, thought

CLIENT, PACKAGE = "Vercel AI SDK", "npm:ai"

Run = Callable[..., Any]
PROVIDERS = [
    "compatible",
    "chat",
    pytest.param("responses", marks=pytest.mark.shows("responses")),
    pytest.param("messages", marks=pytest.mark.shows("messages")),
]
"""@ai-sdk/openai-compatible, both of @ai-sdk/openai, and @ai-sdk/anthropic."""

providers = pytest.mark.parametrize("provider", PROVIDERS)


@pytest.fixture(scope="module")
def run() -> Run:
    return runner("vercel.mjs")


@providers
@pytest.mark.shows("chat", "usage")
def test_generate_text(run: Run, scripted: Server, script: Scripts, provider: str) -> None:
    made = run(f"{provider}.text", scripted, script("Hello there."))
    assert (made["text"], made["finishReason"]) == ("Hello there.", "stop")
    assert made["usage"]["outputTokens"] > 0


@providers
@pytest.mark.shows("streamed", "usage")
def test_stream_text(run: Run, scripted: Server, script: Scripts, provider: str) -> None:
    made = run(f"{provider}.stream", scripted, script("Hello there."))
    assert (made["text"], made["finishReason"]) == ("Hello there.", "stop")
    assert made["usage"]["inputTokens"] > 0


@providers
@pytest.mark.shows("tools")
@pytest.mark.parametrize("how", ["tools", pytest.param("streamTools", marks=pytest.mark.shows("streamed"))])
def test_loop_of_tools(run: Run, scripted: Server, script: Scripts, provider: str, how: str) -> None:
    calls = call("weather", city="Rome") + "\n" + call("local_time", city="Rome")
    word = script(thought("Let me see.") + "I look it up.\n" + calls, call("weather", city="Oslo"), "Sunny, at noon.")
    first, second, third = run(f"{provider}.{how}", scripted, word)
    assert first["calls"] == [["weather", {"city": "Rome"}], ["local_time", {"city": "Rome"}]]
    assert (first["text"], first["finishReason"]) == ("I look it up.", "tool-calls")
    assert second["calls"] == [["weather", {"city": "Oslo"}]]
    assert third["text"] == "Sunny, at noon."


@pytest.mark.parametrize(
    "provider",
    [
        "compatible",
        "messages",
        pytest.param("chat", marks=pytest.mark.xfail(reason="the chat of @ai-sdk/openai reads no reasoning")),
        "responses",
    ],
)
@pytest.mark.shows("reasoning")
def test_reasoning(run: Run, scripted: Server, script: Scripts, provider: str) -> None:
    (made,) = run(f"{provider}.reasoning", scripted, script(thought("Let me see.") + "Yes."))
    assert (made["reasoningText"], made["text"]) == ("Let me see.", "Yes.")


@providers
@pytest.mark.shows("forced tool")
@pytest.mark.parametrize("choice", ["required", "named"])
def test_forced_tools(run: Run, demo: Server, provider: str, choice: str) -> None:
    (made,) = run(f"{provider}.{choice}", demo, "The weather in Rome?")
    name, arguments = made["calls"][0]  # a model that must call may go on with more, which the limit cuts short
    assert name in ({"weather", "local_time"} if choice == "required" else {"weather"})
    assert set(arguments) == {"city"}


@providers
@pytest.mark.shows("structured output")
@pytest.mark.parametrize("how", ["object", "output"])
def test_objects(run: Run, demo: Server, provider: str, how: str) -> None:
    Person.model_validate(run(f"{provider}.{how}", demo, "Somebody"))


@providers
@pytest.mark.shows("structured output", "streamed")
def test_stream_object(run: Run, scripted: Server, script: Scripts, provider: str) -> None:
    text = (
        call("json", **json.loads(PERSON_JSON)) if provider == "messages" else PERSON_JSON
    )  # Anthropic's asks by a tool
    made = run(f"{provider}.streamObject", scripted, script(text))
    assert made["object"] == json.loads(PERSON_JSON)
    assert made["parts"][0].keys() < made["object"].keys()
