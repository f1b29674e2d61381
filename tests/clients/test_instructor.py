"""instructor: every mode that it has for servers of OpenAI's protocol."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
import pydantic
import pytest
from instructor import Mode
from samples import ADA, PERSON_JSON, Person
from servers import KEY, Scripts, Server, call

CLIENT, PACKAGE = "instructor", "instructor"

FORCED = pytest.mark.shows("forced tool")
SCHEMA = pytest.mark.shows("structured output")
MODES_WITH_A_GRAMMAR = [
    pytest.param(Mode.TOOLS, marks=FORCED, id="tools"),
    pytest.param(Mode.JSON_SCHEMA, marks=SCHEMA, id="json-schema"),
    pytest.param(Mode.RESPONSES_TOOLS, marks=pytest.mark.shows("responses", "forced tool"), id="responses-tools"),
]


def client_of(server: Server, mode: Mode) -> Any:
    inner = openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0, timeout=60)
    return instructor.from_openai(inner, mode=mode)


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("mode", MODES_WITH_A_GRAMMAR)
def test_any_model_keeps_to_the_schema(demo: Server, mode: Mode) -> None:
    client = client_of(demo, mode)
    asked: Any = {"model": "demo", "response_model": Person, "max_retries": 0}
    limit = {"max_output_tokens": 300} if mode is Mode.RESPONSES_TOOLS else {"max_tokens": 300}
    assert isinstance(client.create(messages=said("Somebody"), **asked, **limit), Person)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        pytest.param(Mode.TOOLS, call("Person", **ADA.model_dump()), marks=FORCED, id="tools"),
        pytest.param(Mode.JSON_SCHEMA, PERSON_JSON, marks=SCHEMA, id="json-schema"),
        pytest.param(Mode.JSON, PERSON_JSON, marks=SCHEMA, id="json"),
        pytest.param(Mode.MD_JSON, f"```json\n{PERSON_JSON}\n```", marks=pytest.mark.shows("chat"), id="md-json"),
        pytest.param(
            Mode.RESPONSES_TOOLS,
            call("Person", **ADA.model_dump()),
            marks=pytest.mark.shows("responses", "forced tool"),
            id="responses-tools",
        ),
    ],
)
def test_mode(scripted: Server, script: Scripts, mode: Mode, text: str) -> None:
    client = client_of(scripted, mode)
    asked: Any = {"model": "scripted", "response_model": Person, "max_retries": 0}
    made = client.create(messages=said(f"Ada {script(text)}"), **asked)
    assert made.model_dump() == ADA.model_dump()  # instructor makes a class of its own


@pytest.mark.parametrize("mode", [pytest.param(Mode.TOOLS, marks=FORCED), pytest.param(Mode.JSON_SCHEMA, marks=SCHEMA)])
@pytest.mark.shows("streamed")
def test_partial_objects_are_streamed(scripted: Server, script: Scripts, mode: Mode) -> None:
    text = call("PartialPerson", **ADA.model_dump()) if mode is Mode.TOOLS else PERSON_JSON
    client = client_of(scripted, mode)
    asked: Any = {"model": "scripted", "response_model": Person, "max_retries": 0}
    parts = list(client.create_partial(messages=said(f"Ada {script(text)}"), **asked))
    assert parts[-1].model_dump() == ADA.model_dump()
    assert parts[0].age is None


class Weather(pydantic.BaseModel):
    city: str
    unit: Literal["C", "F"]


@pytest.mark.shows("tools")
def test_parallel_tools(scripted: Server, script: Scripts) -> None:
    calls = call("Weather", city="Rome", unit="C") + "\n" + call("Person", **ADA.model_dump())
    client = client_of(scripted, Mode.PARALLEL_TOOLS)
    asked: Any = {"model": "scripted", "response_model": Iterable[Weather | Person], "max_retries": 0}
    made = list(client.create(messages=said(script(calls)), **asked))
    assert made == [Weather(city="Rome", unit="C"), ADA]


@pytest.mark.shows("usage")
def test_usage(scripted: Server, script: Scripts) -> None:
    client = client_of(scripted, Mode.JSON)
    asked: Any = {"model": "scripted", "response_model": Person, "max_retries": 0}
    made, completion = client.create_with_completion(messages=said(f"Ada {script(PERSON_JSON)}"), **asked)
    assert made.model_dump() == ADA.model_dump()
    assert completion.usage.completion_tokens > 0
