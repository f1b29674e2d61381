"""LangChain's ChatOpenAI: bind_tools, with_structured_output, streams."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from samples import ADA, PERSON_JSON, Person
from servers import KEY, Scripts, Server, call

CLIENT, PACKAGE = "LangChain", "langchain-openai"


def model_of(server: Server, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=server.model, base_url=server.v1, api_key=SecretStr(KEY), max_retries=0, timeout=60, **settings
    )


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


@tool
def local_time(city: str) -> str:
    """The time in a city."""
    return f"noon in {city}"


@pytest.mark.shows("chat", "usage")
def test_chat(scripted: Server, script: Scripts) -> None:
    made = model_of(scripted).invoke(script("Hello there."))
    assert made.content == "Hello there."
    assert made.usage_metadata is not None
    assert made.usage_metadata["output_tokens"] > 0


@pytest.mark.shows("streamed", "usage")
def test_stream(scripted: Server, script: Scripts) -> None:
    chunks = list(model_of(scripted, stream_usage=True).stream(script("Hello there.")))
    assert "".join(str(chunk.content) for chunk in chunks) == "Hello there."
    assert any(chunk.usage_metadata for chunk in chunks)


@pytest.mark.shows("tools")
@pytest.mark.parametrize("streamed", [pytest.param(True, marks=pytest.mark.shows("streamed")), False])
def test_bind_tools_in_a_loop(scripted: Server, script: Scripts, streamed: bool) -> None:
    word = script(
        "I look it up.\n" + call("weather", city="Rome") + "\n" + call("local_time", city="Rome"), "Sunny, at noon."
    )
    model = model_of(scripted).bind_tools([weather, local_time])
    messages: list[Any] = [HumanMessage(f"Rome? {word}")]
    if streamed:
        made: Any = AIMessageChunk("")
        for chunk in model.stream(messages):
            made = made + chunk
    else:
        made = model.invoke(messages)
    assert [(one["name"], one["args"]) for one in made.tool_calls] == [
        ("weather", {"city": "Rome"}),
        ("local_time", {"city": "Rome"}),
    ]
    messages.append(made)
    for one in made.tool_calls:
        result = {"weather": weather, "local_time": local_time}[one["name"]].invoke(one)
        assert isinstance(result, ToolMessage)
        messages.append(result)
    assert model.invoke(messages).content == "Sunny, at noon."


@pytest.mark.shows("forced tool")
@pytest.mark.parametrize(("choice", "names"), [("any", {"Weather", "Person"}), ("Person", {"Person"})])
def test_bind_tools_forced(demo: Server, choice: str, names: set[str]) -> None:
    class Weather(Person):
        """The weather."""

    model = model_of(demo, max_tokens=300).bind_tools([Weather, Person], tool_choice=choice)
    (made,) = model.invoke("Rome?").tool_calls[:1]
    assert made["name"] in names
    Person.model_validate(made["args"])


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("json_schema", marks=pytest.mark.shows("structured output")),
        pytest.param("function_calling", marks=pytest.mark.shows("forced tool")),
    ],
)
@pytest.mark.parametrize("strict", [None, True])
def test_with_structured_output(demo: Server, method: Any, strict: bool | None) -> None:
    model = model_of(demo, max_tokens=300).with_structured_output(Person, method=method, strict=strict)
    assert isinstance(model.invoke("Somebody"), Person)


@pytest.mark.shows("structured output")
def test_json_mode(scripted: Server, script: Scripts) -> None:
    model = model_of(scripted).with_structured_output(Person, method="json_mode")
    assert model.invoke(f"Somebody, as JSON {script(PERSON_JSON)}") == ADA


@pytest.mark.shows("structured output", "streamed")
def test_structured_output_is_streamed(scripted: Server, script: Scripts) -> None:
    model = model_of(scripted).with_structured_output(Person.model_json_schema(), method="json_schema")
    parts = list(model.stream(f"Somebody {script(PERSON_JSON)}"))
    assert parts[-1] == ADA.model_dump()


@pytest.mark.shows("responses", "tools")
def test_responses(scripted: Server, script: Scripts) -> None:
    model = model_of(scripted, use_responses_api=True, store=False).bind_tools([weather])
    word = script(call("weather", city="Rome"), "Sunny.")
    messages: list[Any] = [HumanMessage(f"Rome? {word}")]
    made = model.invoke(messages)
    assert [(one["name"], one["args"]) for one in made.tool_calls] == [("weather", {"city": "Rome"})]
    messages += [made, weather.invoke(made.tool_calls[0])]
    assert model.invoke(messages).text == "Sunny."


@pytest.mark.shows("responses", "structured output")
def test_responses_with_structured_output(demo: Server) -> None:
    model = model_of(demo, use_responses_api=True, store=False, max_tokens=300).with_structured_output(Person)
    assert isinstance(model.invoke("Somebody"), Person)
