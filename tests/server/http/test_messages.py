"""How messages reach a chat template."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.server.front_end.errors import ApiError
from engine.server.http.call_arguments import with_arguments, with_objects
from engine.server.http.messages import Message, template_message
from engine.server.http.request_bodies import decode

CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def rendered(**fields: Any) -> dict[str, Any]:
    """What the template receives for the message with these fields."""
    message = template_message(decode(msgspec.json.encode(fields), Message), "messages[3]")
    return dict(with_arguments([message], 1000, "messages")[0])


def test_a_call_and_its_result_reach_the_template() -> None:
    assert rendered(role="assistant", content=None, reasoning_content="hm", tool_calls=[CALL]) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert rendered(role="tool", tool_call_id="c1", name="f", content="2") == {
        "role": "tool",
        "content": "2",
        "name": "f",
        "tool_call_id": "c1",
    }


@pytest.mark.parametrize(
    ("text", "arguments"),
    [("", {}), (" ", {}), ("{}", {}), ('{"a": [1]}', {"a": [1]}), ('{"a": ', '{"a": '), ("[1]", "[1]"), ("x", "x")],
)
def test_arguments_are_an_object_unless_they_were_cut_short(text: str, arguments: Any) -> None:
    call = CALL | {"function": {"name": "f", "arguments": text}}
    [found] = rendered(role="assistant", tool_calls=[call])["tool_calls"]
    assert found["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": [1, 2], "b": {"c": "d', {"a": [1, 2], "b": {}}),
        ('{"a": True, "b": x}', {"a": True}),
        ('{"a": 1} and more', {"a": 1}),
        ('{"a": "\\ud800', {}),
        ('{"a": "\\ud800"', {"a": "\ufffd"}),
        ("[1]", {}),
        ("x", {}),
    ],
)
def test_arguments_are_their_complete_members_when_a_template_takes_no_text(text: str, arguments: Any) -> None:
    whole = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"z": 1}}}
    broken = CALL | {"function": {"name": "f", "arguments": text}}
    given = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [broken, whole]}]
    [user, message] = with_objects(given)
    assert user == given[0]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [arguments, {"z": 1}]
    assert with_objects([user, message]) == [user, message]


def test_arguments_of_many_values_are_refused_before_they_are_decoded() -> None:
    def call(arguments: str) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    for arguments in ('{"a": [' + "[]," * 999, '{"a": [' + "1," * 9000, '{"a": ["x\\\\", ' + '"a",' * 1000):
        with pytest.raises(ApiError, match="more than 1000 strings, lists and objects") as caught:
            with_arguments([call(arguments)], 1000, "input")
        assert (caught.value.status, caught.value.param) == (413, "input")
    with pytest.raises(ApiError, match=r"server\.max_body_values"):
        with_arguments([call('{"a": [' + "[]," * 100 + "1]}")] * 11, 1000, "input")
    code = json.dumps({"a": "f([{x, y}])" * 1000 + '"' * 5000})
    [message] = with_arguments([call(code)], 1000, "input")
    assert message["tool_calls"][0]["function"]["arguments"] == json.loads(code)


def test_an_answer_of_openais_client_is_accepted_as_it_is() -> None:
    answer = {"content": "a", "refusal": None, "annotations": None, "audio": None, "function_call": None}
    assert rendered(role="assistant", tool_calls=None, **answer) == {"role": "assistant", "content": "a"}
    assert rendered(role="assistant", refusal="I cannot")["content"] == "I cannot"
    parts = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    assert rendered(role="assistant", content=parts)["content"] == "a\nb"
    assert rendered(role="assistant")["content"] == ""


ROME = '{"city": "Rome"}'


def called(**function: Any) -> list[dict[str, Any]]:
    """The calls of an answer that a client sends back. function: what it adds to the function."""
    return [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ROME} | function}]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"content": ROME, "refusal": None, "parsed": None}, id="openai-node stream"),
        pytest.param(
            {
                "content": None,
                "refusal": None,
                "parsed": None,
                "tool_calls": called(parsed_arguments={"city": "Rome"}),
            },
            id="openai-node stream, strict tools",
        ),
        pytest.param({"content": ROME, "parsed": {"city": "Rome"}}, id="openai-node parse"),
        pytest.param(
            {"content": ROME, "tool_calls": None, "parsed": {"city": "Rome"}},
            id="openai-python parse",
        ),
        pytest.param(
            {"content": None, "parsed": None, "tool_calls": called(parsed_arguments={"city": "Rome"})},
            id="openai-python parse, tools",
        ),
        pytest.param(
            {"content": None, "reasoning": None, "tool_call_id": None, "tool_calls": called(description=None)},
            id="huggingface_hub",
        ),
    ],
)
def test_an_answer_is_accepted_when_a_client_sends_it_back_with_its_own_fields(answer: dict[str, Any]) -> None:
    found = rendered(role="assistant", **answer)
    assert found["content"] == (answer["content"] or "")
    if answer.get("tool_calls"):
        assert found["tool_calls"] == [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
        ]
    assert found.keys() <= {"role", "content", "tool_calls"}


def test_a_part_with_an_unknown_null_is_accepted() -> None:
    part = {"type": "text", "text": "a", "annotations": None}
    assert rendered(role="user", content=[part])["content"] == "a"


def test_an_answer_with_litellms_notes_is_accepted_and_they_have_no_effect() -> None:
    notes = {"refusal": None, "reasoning_content": "hm"}
    answer = rendered(role="assistant", content="a", function_call=None, provider_specific_fields=notes)
    assert answer == {"role": "assistant", "content": "a"}


def test_reasoning_has_two_names() -> None:
    assert rendered(role="assistant", content="a", reasoning="hm")["reasoning_content"] == "hm"
    assert "reasoning_content" not in rendered(role="assistant", content="a", reasoning_content="")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"role": "user"}, "content"),
        ({"role": "user", "content": None}, "content"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "reasoning_content"),
        ({"role": "user", "content": "x", "provider_specific_fields": {"a": 1}}, "provider_specific_fields"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content[0]"),
        ({"role": "assistant", "reasoning": "x", "reasoning_content": "y"}, "reasoning"),
        ({"role": "function", "content": "x"}, "role"),
    ],
)
def test_a_message_that_makes_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(**fields)
    assert caught.value.param == f"messages[3].{param}"


@pytest.mark.parametrize("call", [{"id": "c"}, CALL | {"type": "custom"}, CALL | {"function": {"name": "f"}}])
def test_a_call_without_its_parts_is_refused(call: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"tool_calls\[0\]"):
        rendered(role="assistant", tool_calls=[call])
