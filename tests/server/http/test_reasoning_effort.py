"""How reasoning_effort reaches a chat template."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.protocols import Conversation
from engine.server.front_end.errors import ApiError
from engine.server.http.conversation import template_variables


def variables(chat: str, reasoning_effort: str | None = None, chat_template_kwargs: Any = None) -> Any:
    """The variables of a template for a request with these parameters."""
    service = SimpleNamespace(chat_template=chat)
    conversation = Conversation(messages=[], variables=chat_template_kwargs or {}, effort=reasoning_effort)
    return template_variables(cast("Any", service), conversation)


def test_the_effort_is_a_variable_of_templates_that_have_it() -> None:
    assert variables("{{ reasoning_effort }}", reasoning_effort="high") == {"reasoning_effort": "high"}
    assert variables("", chat_template_kwargs={"a": 1}) == {"a": 1}


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_no_effort_turns_thinking_off(switch: str) -> None:
    assert variables("{{ " + switch + " }}", reasoning_effort="none") == {switch: False}


@pytest.mark.parametrize(
    ("chat", "given"),
    [
        ("", {"reasoning_effort": "none"}),
        ("{{ messages[0].thinking }}", {"reasoning_effort": "none"}),
        ("{{ enable_thinking }}", {"reasoning_effort": "low"}),
        ("{{ enable_thinking }}", {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}),
        ("{{ reasoning_effort }}", {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}),
    ],
)
def test_an_effort_that_a_template_cannot_express_is_refused(chat: str, given: Any) -> None:
    with pytest.raises(ApiError) as caught:
        variables(chat, **given)
    assert caught.value.param == "reasoning_effort"
