from __future__ import annotations

from typing import Any

import pytest

from engine.core.protocols import ApiError
from engine.plugins.protocols.anthropic import signature
from engine.plugins.protocols.anthropic.bodies import Message
from engine.plugins.protocols.anthropic.conversation import TemplateMessages

IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
CALL = {"type": "tool_use", "id": "toolu_a1", "name": "weather", "input": {"city": "Rome"}}
TEMPLATE_CALL = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def text(said: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **others}


def result(content: Any = None, **others: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_a1", "content": content, **others}


def converted(*messages: tuple[str, Any], system: Any = None, system_anywhere: bool = True) -> list[dict[str, Any]]:
    """Messages, each a role and its content, as chat templates expect them."""
    found = TemplateMessages(system_anywhere=system_anywhere)
    list(found.add_system(system))
    for index, (role, content) in enumerate(messages):
        list(found.add(Message(role=role, content=content), f"messages[{index}]"))
    return found.found()


def said(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def test_texts_are_lines_and_marks_of_the_cache_have_no_effect() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    assert converted(("user", "a"), ("assistant", "b"), ("user", [text("c", **mark), text("d")])) == [
        said("user", "a"),
        said("assistant", "b"),
        said("user", "c\nd"),
    ]


@pytest.mark.parametrize("system", ["a", [text("a")], [text("x-anthropic-billing-header: cch=1;"), text("a")]])
def test_the_system_prompt_is_a_text_or_blocks(system: Any) -> None:
    assert converted(("user", "b"), system=system) == [said("system", "a"), said("user", "b")]


def test_a_line_that_changes_with_each_request_is_no_part_of_the_prompt() -> None:
    first, second = (converted(system=f"x-anthropic-billing-header: cch={n};\n\nYou are.") for n in "12")
    assert first == second == [said("system", "You are.")]
    assert converted(("user", "b"), system=[text("x-anthropic-billing-header: cch=1;")]) == [said("user", "b")]


def test_system_messages_are_one_with_the_system_prompt_or_stand_where_they_are() -> None:
    given: Any = (("system", "b"), ("user", "c"), ("system", [text("d")]), ("user", "e"))
    start = [said("system", "a\nb"), said("user", "c")]
    assert converted(*given, system="a") == [*start, said("system", "d"), said("user", "e")]
    assert converted(*given, system="a", system_anywhere=False) == [start[0], said("user", "c\nd\ne")]


def test_calls_and_their_results_are_messages_of_their_own() -> None:
    found = converted(
        ("user", "a"),
        ("assistant", [{"type": "thinking", "thinking": "why", "signature": "x"}, text("b"), CALL]),
        ("user", [result([text("sunny"), text("20 degrees")]), text("c"), text("d")]),
    )
    assert found == [
        said("user", "a"),
        said("assistant", "b", reasoning_content="why", tool_calls=[TEMPLATE_CALL]),
        said("tool", "sunny\n20 degrees", tool_call_id="a1", name="weather"),
        said("user", "c\nd"),
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result(), ""),
        (result([]), ""),
        (result("x", is_error=False), "x"),
        (result("no such city", is_error=True), "Error: no such city"),
        (result("error: no such city", is_error=True), "error: no such city"),
        (result(is_error=True), "Error: "),
    ],
)
def test_a_result_says_that_it_is_an_error(block: Any, content: str) -> None:
    [found] = converted(("user", [block]))
    assert found == said("tool", content, tool_call_id="a1")


def test_a_reference_to_a_tool_is_its_name() -> None:
    found = TemplateMessages()
    content = [result([text("found"), {"type": "tool_reference", "tool_name": "weather"}])]
    list(found.add(Message(role="user", content=content), "messages[0]"))
    assert found.found() == [said("tool", "found\nweather", tool_call_id="a1")]
    assert found.references == {"weather"}


def test_messages_of_one_role_become_one() -> None:
    thinking = {"type": "thinking", "thinking": "why", "signature": ""}
    assert converted(
        ("user", "a"),
        ("user", [text("b")]),
        ("assistant", [thinking, text("c"), text("d")]),
        ("assistant", [thinking, CALL]),
        ("assistant", [CALL]),
        ("user", [result("1")]),
        ("user", [result("2"), text("e")]),
        ("user", "f"),
    ) == [
        said("user", "a\nb"),
        said("assistant", "cd", reasoning_content="why\nwhy", tool_calls=[TEMPLATE_CALL, TEMPLATE_CALL]),
        said("tool", "1", tool_call_id="a1", name="weather"),
        said("tool", "2", tool_call_id="a1", name="weather"),
        said("user", "e\nf"),
    ]


def test_reasoning_comes_back_from_the_signature_if_its_text_was_omitted() -> None:
    block = {"type": "thinking", "thinking": "", "signature": signature.carrying("why")}
    redacted = {"type": "redacted_thinking", "data": "opaque"}
    assert converted(("user", "a"), ("assistant", [block, redacted, text("b")]))[1] == said(
        "assistant", "b", reasoning_content="why"
    )
    block["signature"] = "of another server"
    assert converted(("user", "a"), ("assistant", [block, text("b")]))[1] == said("assistant", "b")


@pytest.mark.parametrize("content", ["", []])
def test_a_message_may_be_empty(content: Any) -> None:
    assert converted(("user", "a"), ("assistant", content), ("user", content)) == [
        said("user", "a"),
        said("assistant", ""),
        said("user", ""),
    ]


def test_what_clients_send_back_of_an_answer_is_accepted() -> None:
    blocks = [text("a", citations=None), CALL | {"caller": {"type": "direct"}, "toolset_name": None}]
    assert converted(("user", "x"), ("assistant", blocks))[1]["tool_calls"] == [TEMPLATE_CALL]


@pytest.mark.parametrize(
    ("role", "content", "reason"),
    [
        ("tool", "x", r"messages\[0\]\.role is 'tool'; it must be one of user, assistant, system"),
        ("user", [text("a"), IMAGE], r"messages\[0\]\.content\[1\] is of type 'image', .* text only"),
        ("user", [{"type": "document", "source": {}}], r"content\[0\] is of type 'document'"),
        ("user", [result([IMAGE])], r"messages\[0\]\.content\[0\]\.content\[0\] is of type 'image'"),
        ("system", [{"type": "tool_reference", "tool_name": "f"}], "is of type 'tool_reference'"),
        ("user", [{"text": "a"}], r"messages\[0\]\.content\[0\]\.type is missing"),
        ("user", [CALL], "a block of type tool_use is allowed only in a message of role assistant"),
        ("assistant", [result("x")], "tool_result is allowed only in a message of role user"),
        ("system", [IMAGE], "is of type 'image'"),
        ("assistant", [CALL | {"input": "x"}], r"messages\[0\]\.content\[0\]\.input: expected object, got str"),
        ("assistant", [CALL | {"mine": 1}], r"messages\[0\]\.content\[0\]\.mine is not a parameter"),
        ("assistant", [{"type": "tool_use", "id": "a", "name": "f"}], r"messages\[0\]\.content\[0\]\.input is missing"),
        (
            "assistant",
            [{"type": "thinking", "thinking": "", "signature": "engine/1:?"}],
            r"messages\[0\]\.content\[0\]\.signature: the signature is damaged; send blocks back as they came",
        ),
    ],
)
def test_what_the_model_cannot_be_given_is_refused_by_name(role: str, content: Any, reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        converted((role, content))
    assert caught.value.status == 400


def test_a_message_that_the_model_sees_for_a_while_is_refused_unless_it_is_for_good() -> None:
    found = TemplateMessages()
    list(found.add(Message(role="system", content="a", clear_at="never"), "messages[0]"))
    assert found.found() == [said("system", "a")]
    with pytest.raises(ApiError, match="only in a message of role system"):
        list(found.add(Message(role="user", content="a", clear_at="never"), "messages[0]"))
