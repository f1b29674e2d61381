"""pydantic-ai: agents with tools, and its three ways to structured output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from samples import ADA, PERSON_JSON, Person
from servers import KEY, Scripts, Server, call, thought

CLIENT, PACKAGE = "pydantic-ai", "pydantic-ai-slim"


def chat_model(server: Server) -> OpenAIChatModel:
    return OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.v1, api_key=KEY))


def responses_model(server: Server) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(server.model, provider=OpenAIProvider(base_url=server.v1, api_key=KEY))


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def local_time(city: str) -> str:
    """The time in a city."""
    return f"noon in {city}"


@pytest.mark.shows("chat", "usage")
def test_chat(scripted: Server, script: Scripts) -> None:
    made = Agent(chat_model(scripted)).run_sync(script("Hello there."))
    assert made.output == "Hello there."
    assert made.usage.output_tokens > 0


@pytest.mark.shows("tools")
def test_agent_uses_two_tools(scripted: Server, script: Scripts) -> None:
    word = script(
        call("weather", city="Rome"), call("local_time", city="Rome") + call("weather", city="Oslo"), "Sunny, at noon."
    )
    made = Agent(chat_model(scripted), tools=[weather, local_time]).run_sync(f"Rome? {word}")
    assert made.output == "Sunny, at noon."
    assert made.usage.tool_calls == 3


async def streamed_text(model: Any, word: str) -> str:
    async with Agent(model, tools=[weather]).run_stream(f"Rome? {word}") as run:
        return await run.get_output()


@pytest.mark.shows("tools", "streamed")
def test_stream(scripted: Server, script: Scripts) -> None:
    word = script(call("weather", city="Rome"), "Sunny.")
    assert asyncio.run(streamed_text(chat_model(scripted), word)) == "Sunny."


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(ToolOutput(Person), marks=pytest.mark.shows("forced tool"), id="tool"),
        pytest.param(ToolOutput(Person, strict=True), marks=pytest.mark.shows("forced tool"), id="strict-tool"),
        pytest.param(NativeOutput(Person), marks=pytest.mark.shows("structured output"), id="native"),
    ],
)
def test_any_model_keeps_to_the_output_type(demo: Server, output: Any) -> None:
    agent = Agent(chat_model(demo), output_type=output, retries=0)
    assert isinstance(agent.run_sync("Somebody", model_settings={"max_tokens": 300}).output, Person)


@pytest.mark.shows("structured output")
def test_prompted_output(scripted: Server, script: Scripts) -> None:
    agent = Agent(chat_model(scripted), output_type=PromptedOutput(Person), retries=0)
    assert agent.run_sync(f"Ada {script(PERSON_JSON)}").output == ADA


@pytest.mark.shows("tools", "forced tool")
def test_output_by_a_tool_after_another_tool(scripted: Server, script: Scripts) -> None:
    word = script(call("weather", city="Rome"), call("final_result", **ADA.model_dump()))
    agent = Agent(chat_model(scripted), tools=[weather], output_type=Person, retries=0)
    assert agent.run_sync(f"Ada {word}").output == ADA


@pytest.mark.shows("reasoning")
def test_reasoning(scripted: Server, script: Scripts) -> None:
    word = script(thought("Let me see.") + call("weather", city="Rome"), "Sunny.")
    made = Agent(chat_model(scripted), tools=[weather]).run_sync(f"Rome? {word}")
    assert made.output == "Sunny."
    parts = [part for message in made.all_messages() for part in message.parts if isinstance(part, ThinkingPart)]
    assert [part.content for part in parts] == ["Let me see."]


@pytest.mark.shows("responses", "tools")
def test_responses(scripted: Server, script: Scripts) -> None:
    word = script(thought("Let me see.") + call("weather", city="Rome"), "Sunny.")
    assert Agent(responses_model(scripted), tools=[weather]).run_sync(f"Rome? {word}").output == "Sunny."


@pytest.mark.shows("responses", "structured output")
def test_responses_with_structured_output(demo: Server) -> None:
    agent = Agent(responses_model(demo), output_type=NativeOutput(Person), retries=0)
    assert isinstance(agent.run_sync("Somebody", model_settings={"max_tokens": 300}).output, Person)
