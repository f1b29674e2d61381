"""openai-python: chat, `.parse`, the streaming helpers, completions, responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from samples import ADA, PARAMETERS, PERSON_JSON, TIME, WEATHER, Person
from servers import KEY, Scripts, Server, call, thought

CLIENT, PACKAGE = "openai-python", "openai"


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(scripted: Server) -> Iterator[openai.OpenAI]:
    with client_of(scripted) as made:
        yield made


@pytest.fixture(scope="module")
def real(demo: Server) -> Iterator[openai.OpenAI]:
    """A client of the demo model."""
    with client_of(demo) as made:
        yield made


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.mark.shows("chat", "usage")
def test_chat(client: openai.OpenAI, script: Scripts) -> None:
    asked: Any = {"model": "scripted", "messages": said(script("Hello there.") + " again " * 20)}
    made = client.chat.completions.create(**asked)
    assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("Hello there.", "stop")
    again = client.chat.completions.create(**asked)
    for usage in (made.usage, again.usage):
        assert usage is not None
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens


@pytest.mark.shows("streamed", "usage")
def test_stream(client: openai.OpenAI, script: Scripts) -> None:
    asked: Any = {"model": "scripted", "messages": said(script("Hello there."))}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello there."
    assert chunks[-1].usage is not None


@pytest.mark.shows("tools", "chat")
def test_two_calls_and_their_results(client: openai.OpenAI, script: Scripts) -> None:
    calls = call("weather", city="Rome") + "\n" + call("local_time", city="Rome")
    messages = said(script("I look it up.\n" + calls, "Sunny, at noon."))
    asked: Any = {"model": "scripted", "tools": [WEATHER, TIME]}
    choice = client.chat.completions.create(**asked, messages=messages).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look it up.", "tool_calls")
    assert choice.message.tool_calls is not None
    functions = [one.function for one in choice.message.tool_calls if one.type == "function"]
    assert [(one.name, json.loads(one.arguments)) for one in functions] == [
        ("weather", {"city": "Rome"}),
        ("local_time", {"city": "Rome"}),
    ]
    messages.append(choice.message)
    for one, result in zip(choice.message.tool_calls, ("sunny", "12:00"), strict=True):
        messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    assert client.chat.completions.create(**asked, messages=messages).choices[0].message.content == "Sunny, at noon."


@pytest.mark.shows("tools", "streamed")
def test_stream_helper_assembles_calls(client: openai.OpenAI, script: Scripts) -> None:
    text = "I look it up.\n" + call("weather", city="Rome") + "\n" + call("local_time", city="Oslo")
    asked: Any = {"model": "scripted", "messages": said(script(text)), "tools": [WEATHER, TIME]}
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        made = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("weather", {"city": "Rome"}),
        ("local_time", {"city": "Oslo"}),
    ]
    message = made.choices[0].message
    assert (message.role, message.content, made.choices[0].finish_reason) == (
        "assistant",
        "I look it up.",
        "tool_calls",
    )
    assert message.tool_calls is not None
    assert len({one.id for one in message.tool_calls}) == 2
    assert made.usage is not None


@pytest.mark.shows("tools", "structured output")
def test_parse_reads_the_arguments_of_strict_tools(client: openai.OpenAI, script: Scripts) -> None:
    class Weather(pydantic.BaseModel):
        city: str

    asked: Any = {"model": "scripted", "tools": [openai.pydantic_function_tool(Weather)]}
    messages = said(script(call("Weather", city="Rome"), "Sunny."))
    answer = client.chat.completions.parse(**asked, messages=messages).choices[0].message
    assert answer.tool_calls is not None
    assert answer.tool_calls[0].function.parsed_arguments == Weather(city="Rome")
    messages += [answer, {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}]
    assert client.chat.completions.parse(**asked, messages=messages).choices[0].message.content == "Sunny."


@pytest.mark.shows("forced tool")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("tool_choice", "names", "finish_reason"),
    [
        ("required", {"weather", "local_time"}, "tool_calls"),
        ({"type": "function", "function": {"name": "local_time"}}, {"local_time"}, "stop"),
    ],
    ids=["required", "named"],
)
def test_forced_tools(real: openai.OpenAI, tool_choice: Any, names: set[str], finish_reason: str, stream: bool) -> None:
    asked: Any = {
        "model": "demo",
        "messages": said("The weather in Rome?"),
        "tools": [WEATHER, TIME],
        "tool_choice": tool_choice,
        "parallel_tool_calls": False,
        "max_completion_tokens": 300,
    }
    if stream:
        with real.chat.completions.stream(**asked) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = real.chat.completions.create(**asked).choices[0]
    (made,) = choice.message.tool_calls
    assert made.function.name in names
    assert set(json.loads(made.function.arguments)) == {"city"}
    assert choice.finish_reason == finish_reason


@pytest.mark.shows("structured output")
@pytest.mark.parametrize("temperature", [0, 1])
def test_parse(real: openai.OpenAI, temperature: int) -> None:
    asked: Any = {"model": "demo", "messages": said("Somebody"), "temperature": temperature, "n": 2}
    made = real.chat.completions.parse(**asked, response_format=Person, max_completion_tokens=300)
    assert all(isinstance(choice.message.parsed, Person) for choice in made.choices)


@pytest.mark.shows("structured output", "streamed")
def test_stream_helper_parses(real: openai.OpenAI, client: openai.OpenAI, script: Scripts) -> None:
    asked: Any = {"response_format": Person, "max_completion_tokens": 300}
    with real.chat.completions.stream(model="demo", messages=said("Somebody"), **asked) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    messages = said(script(PERSON_JSON, "Ada."))
    with client.chat.completions.stream(model="scripted", messages=messages, **asked) as stream:
        assert any(event.type == "content.done" and event.parsed == ADA for event in stream)
        answer: Any = stream.get_final_completion().choices[0].message
    again = client.chat.completions.create(model="scripted", messages=[*messages, answer, *said("Who?")])
    assert again.choices[0].message.content == "Ada."


@pytest.mark.shows("structured output")
def test_json_object_and_choice(real: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "messages": said("Yes or no?"), "max_completion_tokens": 20}
    made = real.chat.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert made.choices[0].message.content in ("yes", "no")
    made = real.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert (made.choices[0].message.content or "").startswith("{")


@pytest.mark.shows("structured output", "completions")
def test_completions_with_a_regular_expression(real: openai.OpenAI) -> None:
    made = real.completions.create(
        model="demo", prompt="A date: ", extra_body={"structured_outputs": {"regex": r"[0-9]{4}-[0-9]{2}"}}
    )
    assert len(made.choices[0].text) == 7


@pytest.mark.shows("reasoning")
def test_reasoning(client: openai.OpenAI, script: Scripts) -> None:
    text = thought("Let me see.") + "Yes."
    asked: Any = {"model": "scripted"}
    made = client.chat.completions.create(**asked, messages=said(script(text))).choices[0].message
    assert made.model_extra is not None
    assert (made.model_extra["reasoning_content"], made.content) == ("Let me see.", "Yes.")
    chunks = client.chat.completions.create(**asked, messages=said(script(text)), stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    extras = [delta.model_extra or {} for delta in deltas]
    assert "".join(extra.get("reasoning_content") or "" for extra in extras) == "Let me see."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


@pytest.mark.shows("reasoning", "tools")
def test_no_reasoning_is_asked_for(client: openai.OpenAI, script: Scripts) -> None:
    asked: Any = {"model": "scripted", "reasoning_effort": "none", "tools": [WEATHER]}
    made = client.chat.completions.create(**asked, messages=said(script(call("weather", city="Rome"))))
    assert made.choices[0].message.tool_calls is not None


@pytest.mark.shows("errors")
def test_errors(client: openai.OpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": said("Hello")}
    with pytest.raises(openai.NotFoundError, match="another"):
        client.chat.completions.create(**asked | {"model": "another"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked, extra_body={"nonsense": 1}, stream=True)
    assert caught.value.param == "nonsense"


# The Responses API.

FLAT = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}


@pytest.mark.shows("responses", "usage")
def test_response(client: openai.OpenAI, script: Scripts) -> None:
    asked: Any = {"model": "scripted", "input": script("Hello there."), "instructions": "Be kind."}
    made = client.responses.create(**asked, store=False)
    assert (made.output_text, made.status) == ("Hello there.", "completed")
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert client.responses.input_tokens.count(**asked).input_tokens == made.usage.input_tokens


@pytest.mark.shows("responses", "tools", "reasoning")
def test_response_with_reasoning_and_a_call(client: openai.OpenAI, script: Scripts) -> None:
    items: Any = said(script(thought("Let me see.") + call("weather", city="Rome"), "Sunny."))
    asked: Any = {"model": "scripted", "tools": [FLAT], "store": False}
    made = client.responses.create(**asked, input=items)
    reasoning, one = made.output
    assert reasoning.type == "reasoning"
    assert one.type == "function_call"
    assert (one.name, json.loads(one.arguments)) == ("weather", {"city": "Rome"})
    items += made.output
    items.append({"type": "function_call_output", "call_id": one.call_id, "output": "sunny"})
    assert client.responses.create(**asked, input=items).output_text == "Sunny."


@pytest.mark.shows("responses", "streamed", "tools")
def test_response_stream_helper(client: openai.OpenAI, script: Scripts) -> None:
    text = thought("Let me see.") + "I look it up.\n" + call("weather", city="Rome")
    asked: Any = {"model": "scripted", "tools": [FLAT], "store": False}
    with client.responses.stream(**asked, input=script(text)) as stream:
        events = list(stream)
        made = stream.get_final_response()
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    assert made.output_text == "I look it up."
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads(done.arguments) == {"city": "Rome"}
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )


@pytest.mark.shows("responses", "structured output")
def test_response_parse(real: openai.OpenAI) -> None:
    made = real.responses.parse(
        model="demo", input="Somebody", text_format=Person, max_output_tokens=300, store=False, temperature=1
    )
    assert isinstance(made.output_parsed, Person)


@pytest.mark.shows("responses", "forced tool")
@pytest.mark.parametrize("name", ["", "weather"], ids=["required", "named"])
def test_response_with_a_forced_tool(real: openai.OpenAI, name: str) -> None:
    tool_choice = {"type": "function", "name": name} if name else "required"
    asked: Any = {"tools": [FLAT], "tool_choice": tool_choice, "parallel_tool_calls": False, "store": False}
    made = real.responses.create(model="demo", input="Rome?", max_output_tokens=300, **asked)
    (one,) = [item for item in made.output if item.type == "function_call"]
    assert set(json.loads(one.arguments)) == {"city"}
