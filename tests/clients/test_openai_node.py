"""openai-node: chat, `runTools`, `.parse`, the streaming helpers, responses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from node_clients import runner
from samples import PERSON_JSON, Person
from servers import Scripts, Server, call, thought

CLIENT, PACKAGE = "openai-node", "npm:openai"

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Run:
    return runner("openai.mjs")


@pytest.mark.shows("chat", "usage")
def test_chat(run: Run, scripted: Server, script: Scripts) -> None:
    made = run("chat", scripted, script("Hello there."))
    assert made["choices"][0]["message"]["content"] == "Hello there."
    assert made["usage"]["completion_tokens"] > 0


@pytest.mark.shows("streamed", "usage", "reasoning")
def test_stream(run: Run, scripted: Server, script: Scripts) -> None:
    *chunks, last = run("stream", scripted, script(thought("Let me see.") + "Hello there."))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello there."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Let me see."
    assert last["usage"]["completion_tokens"] > 0


CALLS = call("weather", city="Rome") + "\n" + call("local_time", city="Rome")


@pytest.mark.shows("tools")
def test_run_tools(run: Run, scripted: Server, script: Scripts) -> None:
    made = run("runTools", scripted, script(CALLS, call("weather", city="Oslo"), "Sunny, at noon."))
    assert made["content"] == "Sunny, at noon."
    results = [message["content"] for message in made["messages"] if message["role"] == "tool"]
    assert results == ["sunny in Rome", "noon in Rome", "sunny in Oslo"]


@pytest.mark.shows("tools", "streamed")
def test_stream_helper_assembles_calls(run: Run, scripted: Server, script: Scripts) -> None:
    made = run("streamTools", scripted, script("I look it up.\n" + CALLS))["choices"][0]
    assert (made["message"]["content"], made["finish_reason"]) == ("I look it up.", "tool_calls")
    functions = [one["function"] for one in made["message"]["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [
        ("weather", {"city": "Rome"}),
        ("local_time", {"city": "Rome"}),
    ]


@pytest.mark.shows("forced tool", "streamed")
@pytest.mark.parametrize("choice", ["required", "named"])
def test_forced_tools(run: Run, demo: Server, choice: str) -> None:
    for made in run(choice, demo, "The weather in Rome?"):
        assert made["name"] in ({"weather", "local_time"} if choice == "required" else {"weather"})
        assert set(json.loads(made["arguments"])) == {"city"}


@pytest.mark.shows("tools")
def test_strict_tools_are_parsed(run: Run, scripted: Server, script: Scripts) -> None:
    made = run("strictTool", scripted, script(call("weather", city="Rome")))["choices"][0]["message"]
    assert made["tool_calls"][0]["function"]["parsed_arguments"] == {"city": "Rome"}


@pytest.mark.shows("chat")
@pytest.mark.parametrize("what", ["streamAgain", "strictToolAgain"])
def test_an_answer_of_a_helper_is_sent_back(run: Run, scripted: Server, script: Scripts, what: str) -> None:
    first = "Hello." if what == "streamAgain" else call("weather", city="Rome")
    assert run(what, scripted, script(first, "Sunny."))["content"] == "Sunny."


@pytest.mark.shows("structured output")
def test_parse(run: Run, demo: Server) -> None:
    Person.model_validate(run("parse", demo, "Somebody")["choices"][0]["message"]["parsed"])


@pytest.mark.shows("structured output", "streamed")
def test_stream_helper_parses(run: Run, scripted: Server, script: Scripts) -> None:
    made = run("parseStream", scripted, script(PERSON_JSON))["choices"][0]["message"]["parsed"]
    assert made == json.loads(PERSON_JSON)


@pytest.mark.shows("responses", "usage")
def test_response(run: Run, scripted: Server, script: Scripts) -> None:
    made = run("response", scripted, script("Hello there."))
    assert (made["output_text"], made["status"]) == ("Hello there.", "completed")
    assert made["usage"]["output_tokens"] > 0


@pytest.mark.shows("responses", "tools", "streamed", "reasoning")
def test_response_stream_helper(run: Run, scripted: Server, script: Scripts) -> None:
    first, second = run(
        "responseTools", scripted, script(thought("Let me see.") + call("weather", city="Rome"), "Sunny.")
    )
    assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
    assert json.loads(first["output"][1]["arguments"]) == {"city": "Rome"}
    assert second["output_text"] == "Sunny."


@pytest.mark.shows("responses", "forced tool")
def test_response_with_a_forced_tool(run: Run, demo: Server) -> None:
    (made,) = run("responseForced", demo, "Rome?")["output"]
    assert (made["type"], made["name"], set(json.loads(made["arguments"]))) == ("function_call", "weather", {"city"})


@pytest.mark.shows("responses", "structured output")
def test_response_parse(run: Run, demo: Server) -> None:
    Person.model_validate(run("responseParse", demo, "Somebody")["output_parsed"])
