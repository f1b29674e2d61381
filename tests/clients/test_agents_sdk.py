"""OpenAI Agents SDK: agents with tools and output types, by its models for chat completions and for responses."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
import pytest
from agents import Agent, AgentOutputSchema, ModelSettings, Runner, function_tool
from samples import ADA, PERSON_JSON, Person
from servers import KEY, Scripts, Server, call, thought

CLIENT, PACKAGE = "OpenAI Agents SDK", "openai-agents"

agents.set_tracing_disabled(True)
MODELS = pytest.mark.parametrize(
    "model_class",
    [
        agents.OpenAIChatCompletionsModel,
        pytest.param(agents.OpenAIResponsesModel, marks=pytest.mark.shows("responses")),
    ],
    ids=["chat", "responses"],
)


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@function_tool
def local_time(city: str) -> str:
    """The time in a city."""
    return f"noon in {city}"


def agent(model_class: Any, server: Server, settings: ModelSettings | None = None, **parts: Any) -> Agent[Any]:
    client = openai.AsyncOpenAI(base_url=server.v1, api_key=KEY, max_retries=0, timeout=60)
    model = model_class(model=server.model, openai_client=client)
    return Agent(name="guide", model=model, model_settings=settings or ModelSettings(store=False), **parts)


@MODELS
@pytest.mark.shows("chat", "usage")
def test_answer(scripted: Server, script: Scripts, model_class: Any) -> None:
    made = Runner.run_sync(agent(model_class, scripted, instructions="Be kind."), script("Hello there."))
    assert made.final_output == "Hello there."
    assert made.context_wrapper.usage.output_tokens > 0


@MODELS
@pytest.mark.shows("tools", "reasoning")
def test_two_tools(scripted: Server, script: Scripts, model_class: Any) -> None:
    calls = call("local_time", city="Rome") + "\n" + call("weather", city="Oslo")
    word = script(thought("Let me see.") + call("weather", city="Rome"), calls, "Sunny, at noon.")
    made = Runner.run_sync(agent(model_class, scripted, tools=[weather, local_time]), f"Rome? {word}")
    assert made.final_output == "Sunny, at noon."
    results = [item.output for item in made.new_items if item.type == "tool_call_output_item"]
    assert results == ["sunny in Rome", "noon in Rome", "sunny in Oslo"]
    assert any(item.type == "reasoning_item" for item in made.new_items)


@MODELS
@pytest.mark.shows("tools", "streamed")
def test_stream(scripted: Server, script: Scripts, model_class: Any) -> None:
    word = script("I look it up.\n" + call("weather", city="Rome"), "Sunny.")

    async def run() -> tuple[Any, list[Any]]:
        made = Runner.run_streamed(agent(model_class, scripted, tools=[weather]), f"Rome? {word}")
        return made, [event async for event in made.stream_events()]

    made, events = asyncio.run(run())
    assert made.final_output == "Sunny."
    assert sum(event.type == "raw_response_event" and event.data.type == "response.completed" for event in events) == 2
    texts = [
        event.data.delta
        for event in events
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(texts) == "I look it up.Sunny."


@MODELS
@pytest.mark.shows("structured output")
def test_output_type(demo: Server, model_class: Any) -> None:
    settings = ModelSettings(store=False, max_tokens=300)
    made = Runner.run_sync(agent(model_class, demo, settings, output_type=AgentOutputSchema(Person)), "Somebody")
    assert isinstance(made.final_output, Person)


@MODELS
@pytest.mark.shows("structured output", "tools")
def test_output_type_after_a_tool(scripted: Server, script: Scripts, model_class: Any) -> None:
    word = script(call("weather", city="Rome"), PERSON_JSON)
    made = Runner.run_sync(agent(model_class, scripted, tools=[weather], output_type=Person), f"Rome? {word}")
    assert made.final_output == ADA


@MODELS
@pytest.mark.shows("forced tool")
@pytest.mark.parametrize("choice", ["required", "weather"])
def test_forced_tool(demo: Server, model_class: Any, choice: str) -> None:
    @function_tool
    def weather(person: Person) -> str:
        """The weather where a person lives."""
        return person.drinks

    settings = ModelSettings(store=False, max_tokens=300, tool_choice=choice, parallel_tool_calls=False)
    guide = agent(model_class, demo, settings, tools=[weather], tool_use_behavior="stop_on_first_tool")
    assert Runner.run_sync(guide, "Somebody").final_output in ("tea", "coffee")
