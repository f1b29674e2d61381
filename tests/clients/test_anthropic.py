"""anthropic-python: messages, the streaming helper, `.parse`, tools, thinking, counts of tokens, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pydantic
import pytest
from samples import ADA, DESCRIPTION, PARAMETERS, PERSON_JSON, Person
from servers import KEY, Scripts, Server, call, thought

CLIENT, PACKAGE = "anthropic-python", "anthropic"
TOOLS: Any = [
    {"name": "weather", "description": DESCRIPTION, "input_schema": PARAMETERS},
    {"name": "local_time", "input_schema": PARAMETERS},
]


class Choice(pydantic.BaseModel):
    """A choice. The client leaves limits of texts out of the schema, so there is none that could go on for ever."""

    drinks: Literal["tea", "coffee"]
    likes: Literal["cats", "dogs"]


CALLS = call("weather", city="Rome") + "\n" + call("local_time", city="Oslo")


def client_of(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(scripted: Server) -> Iterator[anthropic.Anthropic]:
    with client_of(scripted) as made:
        yield made


@pytest.fixture(scope="module")
def real(demo: Server) -> Iterator[anthropic.Anthropic]:
    """A client of the demo model."""
    with client_of(demo) as made:
        yield made


def asked(content: str, **given: Any) -> Any:
    return {"model": "scripted", "max_tokens": 300, "messages": [{"role": "user", "content": content}]} | given


def joined(client: anthropic.Anthropic, **given: Any) -> tuple[Any, list[Any]]:
    """The message that the streaming helper makes, and the events of the stream."""
    with client.messages.stream(**given) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def comparable(message: Any) -> Any:
    """A message without what differs between two answers to one request."""
    found = message.model_dump(exclude={"id", "usage"})
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


@pytest.mark.shows("messages", "usage")
def test_message(client: anthropic.Anthropic, script: Scripts) -> None:
    given = asked(script("Hello there.") + " again " * 20, system="Be kind.", metadata={"user_id": "u"})
    made = client.messages.create(**given)
    [block] = made.content
    assert (block.type, block.text, made.stop_reason) == ("text", "Hello there.", "end_turn")
    again = client.messages.create(**given)
    assert again.usage.cache_read_input_tokens
    prompts = {one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0) for one in (made, again)}
    count = client.messages.count_tokens(model="scripted", messages=given["messages"], system="Be kind.")
    assert prompts == {count.input_tokens}


@pytest.mark.shows("messages", "streamed", "tools", "reasoning", "usage")
def test_stream_helper_assembles_every_kind_of_block(client: anthropic.Anthropic, script: Scripts) -> None:
    text = thought("Let me see.") + "I look it up.\n" + CALLS
    whole = client.messages.create(**asked(script(text), tools=TOOLS))
    made, events = joined(client, **asked(script(text), tools=TOOLS))
    assert comparable(made) == comparable(whole)
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in made.content[2:]] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert made.stop_reason == "tool_use"
    assert made.usage.output_tokens == whole.usage.output_tokens
    assert "".join(event.text for event in events if event.type == "text") == "I look it up."
    assert len([event for event in events if event.type == "input_json"]) > 2, "arguments come as they are generated"
    assert len([event for event in events if event.type == "signature"]) == 1


@pytest.mark.shows("messages", "tools", "reasoning")
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_two_calls_and_their_results(client: anthropic.Anthropic, script: Scripts, display: str) -> None:
    given = asked(
        script(thought("Let me see.") + CALLS, "Sunny, at noon."),
        tools=TOOLS,
        thinking={"type": "adaptive", "display": display},
    )
    made = client.messages.create(**given)
    thinking, *calls = made.content
    assert thinking.type == "thinking"
    assert thinking.thinking == ("Let me see." if display == "summarized" else "")
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": "sunny", "is_error": False}
        for one in calls
        if one.type == "tool_use"
    ]
    assert len(results) == 2
    given["messages"] += [{"role": "assistant", "content": made.content}, {"role": "user", "content": results}]
    made = client.messages.create(**given)
    assert [block.text for block in made.content if block.type == "text"] == ["Sunny, at noon."]


@pytest.mark.shows("messages", "tools")
def test_tool_runner(client: anthropic.Anthropic, script: Scripts) -> None:
    asked_for = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: its name.
        """
        asked_for.append(city)
        return "sunny"

    given = asked(script(call("weather", city="Rome"), "It is sunny."))
    made = client.beta.messages.tool_runner(**given, tools=[weather]).until_done()
    assert asked_for == ["Rome"]
    assert [block.text for block in made.content if block.type == "text"] == ["It is sunny."]


@pytest.mark.shows("messages")
def test_why_an_answer_ended(client: anthropic.Anthropic, script: Scripts) -> None:
    made = client.messages.create(**asked(script("One, two, three."), stop_sequences=[", th"]))
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", ", th")
    made, _ = joined(client, **asked(script("One, two, three."), max_tokens=2))
    assert made.stop_reason == "max_tokens"


@pytest.mark.shows("messages", "structured output")
def test_parse(client: anthropic.Anthropic, script: Scripts) -> None:
    made = client.messages.parse(**asked(script(PERSON_JSON)), output_format=Person)
    assert made.parsed_output == ADA


@pytest.mark.shows("messages", "structured output", "streamed")
def test_a_schema_is_enforced(real: anthropic.Anthropic) -> None:
    given = asked("Somebody", model="demo", extra_body={"temperature": 1})
    assert isinstance(real.messages.parse(**given, output_format=Choice).parsed_output, Choice)
    with real.messages.stream(**given, output_format=Choice) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Choice)


@pytest.mark.shows("messages", "forced tool")
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "local_time"}], ids=["any", "named"])
def test_forced_tools(real: anthropic.Anthropic, choice: Any) -> None:
    given = asked("The weather in Rome?", model="demo", tools=TOOLS)
    given["tool_choice"] = choice | {"disable_parallel_tool_use": True}
    for made in (real.messages.create(**given), joined(real, **given)[0]):
        [block] = made.content
        assert block.type == "tool_use"
        assert block.name == choice.get("name", block.name)
        assert set(block.input) == {"city"}
        assert made.stop_reason == "tool_use"


@pytest.mark.shows("messages")
def test_beta_parameters_that_change_nothing(client: anthropic.Anthropic, script: Scripts) -> None:
    made = client.beta.messages.create(
        **asked(script("Hello there."), output_config={"effort": "low"}),
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    [block] = made.content
    assert (block.type, block.text) == ("text", "Hello there.")


@pytest.mark.shows("messages", "errors")
def test_errors(client: anthropic.Anthropic, scripted: Server) -> None:
    with pytest.raises(anthropic.NotFoundError, match="this server has no model 'other'") as caught:
        client.messages.create(**asked("x", model="other"))
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"
    assert body["request_id"] == caught.value.request_id is not None
    with pytest.raises(anthropic.BadRequestError, match="takes text only"):
        client.messages.create(**asked("x", messages=[{"role": "user", "content": [{"type": "image"}]}]))


@pytest.mark.shows("messages")
def test_models(client: anthropic.Anthropic) -> None:
    [model] = list(client.models.list())
    assert (model.id, model.type, model.display_name) == ("scripted", "model", "scripted")
    assert client.models.retrieve("scripted").created_at == model.created_at
