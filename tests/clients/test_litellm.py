"""litellm: completion, streams, responses and Anthropic messages, through its provider for OpenAI's protocol."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read when litellm is imported; otherwise it asks the network

import litellm
import pytest
from samples import PARAMETERS, PERSON_JSON, TIME, WEATHER, Person
from servers import KEY, Scripts, Server, call, thought

CLIENT, PACKAGE = "litellm", "litellm"


def to(server: Server, provider: str = "hosted_vllm") -> Any:
    """The arguments of every call. provider: how litellm names servers of one's own, `hosted_vllm` or `openai`."""
    return {"model": f"{provider}/{server.model}", "api_base": server.v1, "api_key": KEY, "num_retries": 0}


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


PROVIDERS = pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])


@PROVIDERS
@pytest.mark.shows("chat", "usage", "reasoning")
def test_completion(scripted: Server, script: Scripts, provider: str) -> None:
    word = script(thought("Let me see.") + "Hello there.")
    made: Any = litellm.completion(**to(scripted, provider), messages=said(word))
    assert made.choices[0].message.content == "Hello there."
    assert made.choices[0].message.reasoning_content == "Let me see."
    assert made.usage.completion_tokens > 0


@PROVIDERS
@pytest.mark.shows("streamed", "tools", "usage")
def test_stream(scripted: Server, script: Scripts, provider: str) -> None:
    calls = call("weather", city="Rome") + "\n" + call("local_time", city="Oslo")
    messages = said(script(thought("Let me see.") + "I look it up.\n" + calls))
    asked: Any = {"tools": [WEATHER, TIME], "stream": True, "stream_options": {"include_usage": True}}
    chunks: Any = list(litellm.completion(**to(scripted, provider), messages=messages, **asked))
    made: Any = litellm.stream_chunk_builder(chunks, messages=messages)
    message = made.choices[0].message
    assert (message.content, made.choices[0].finish_reason) == ("I look it up.", "tool_calls")
    assert message.reasoning_content == "Let me see."
    assert [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls] == [
        ("weather", {"city": "Rome"}),
        ("local_time", {"city": "Oslo"}),
    ]
    assert made.usage.completion_tokens > 0


@PROVIDERS
@pytest.mark.shows("tools")
def test_loop_of_tools(scripted: Server, script: Scripts, provider: str) -> None:
    messages = said(script(call("weather", city="Rome"), "Sunny."))
    asked: Any = to(scripted, provider) | {"tools": [WEATHER]}
    message: Any = litellm.completion(**asked, messages=messages).choices[0].message
    messages.append(message)
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"})
    made: Any = litellm.completion(**asked, messages=messages)
    assert made.choices[0].message.content == "Sunny."


@PROVIDERS
@pytest.mark.shows("forced tool")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tools(demo: Server, provider: str, choice: Any) -> None:
    # litellm takes additionalProperties: false out of tools for hosted_vllm: say otherwise that there is no more.
    function = WEATHER["function"] | {"parameters": PARAMETERS | {"maxProperties": 1}}
    tools = [{"type": "function", "function": function}]
    asked: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300}
    made: Any = litellm.completion(**to(demo, provider), messages=said("Rome?"), **asked)
    (one,) = made.choices[0].message.tool_calls
    assert (one.function.name, set(json.loads(one.function.arguments))) == ("weather", {"city"})


@PROVIDERS
@pytest.mark.shows("structured output")
def test_structured_output(demo: Server, provider: str) -> None:
    asked: Any = {"response_format": Person, "max_tokens": 300}
    made: Any = litellm.completion(**to(demo, provider), messages=said("Somebody"), **asked)
    Person.model_validate_json(made.choices[0].message.content)


@pytest.mark.shows("responses", "usage")
def test_responses(scripted: Server, script: Scripts) -> None:
    asked: Any = {"input": script("Hello there."), "store": False}
    made: Any = litellm.responses(**to(scripted, "openai"), **asked)
    assert made.output_text == "Hello there."
    assert made.usage.output_tokens > 0


@pytest.mark.shows("responses", "structured output")
def test_responses_with_structured_output(demo: Server) -> None:
    asked: Any = {"input": "Somebody", "store": False, "text_format": Person, "max_output_tokens": 300}
    made: Any = litellm.responses(**to(demo, "openai"), **asked)
    Person.model_validate_json(made.output_text)


@pytest.mark.shows("messages", "usage")
def test_anthropic_messages(scripted: Server, script: Scripts) -> None:
    asked: Any = {"max_tokens": 100, "messages": said(script(call("weather", city="Rome")))}
    tool = {"name": "weather", "input_schema": PARAMETERS}
    made: Any = litellm.completion(
        model=f"anthropic/{scripted.model}", api_base=scripted.url, api_key=KEY, num_retries=0, tools=[tool], **asked
    )
    (one,) = made.choices[0].message.tool_calls
    assert (one.function.name, json.loads(one.function.arguments)) == ("weather", {"city": "Rome"})
    assert made.usage.completion_tokens > 0


@pytest.mark.shows("structured output", "streamed")
def test_structured_output_is_streamed(scripted: Server, script: Scripts) -> None:
    asked: Any = {"response_format": Person, "stream": True}
    chunks: Any = litellm.completion(**to(scripted), messages=said(script(PERSON_JSON)), **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert json.loads(text) == json.loads(PERSON_JSON)
