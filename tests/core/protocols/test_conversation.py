from __future__ import annotations

from typing import Any

import pytest

from engine.core.protocols import complete_arguments, template_arguments


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"a": 1,', {"a": 1}),
        ('{"a": 1 ', {"a": 1}),
        (' {"a": true,\n ', {"a": True}),
        ('{"a": None,', {"a": None}),
        ('{"a": [1, 2,', {"a": [1, 2]}),
        ('{"a": [1, 2 , {"b": False, ', {"a": [1, 2, {"b": False}]}),
        ('{"a": 1,,', {"a": 1}),
    ],
)
def test_complete_arguments_keeps_a_member_when_more_follows_it(text: str, arguments: Any) -> None:
    assert complete_arguments(text) == arguments


@pytest.mark.parametrize(
    "text", ['{"a": 1', '{"a": tru', '{"a": Fal', '{"a": "b', '{"a": "b\\', '{"a":', '{"a', "{", "", "1,"]
)
def test_complete_arguments_drops_a_member_when_it_may_go_on(text: str) -> None:
    assert complete_arguments(text) == {}


@pytest.mark.parametrize("read", [template_arguments, complete_arguments])
def test_arguments_have_a_replacement_character_when_they_have_half_a_surrogate_pair(read: Any) -> None:
    assert read(r'{"a": "cut \ud83d", "b": "\ud83d\ude00 \\ud83d"}') == {"a": "cut \ufffd", "b": "\U0001f600 \\ud83d"}


def test_template_arguments_stay_a_text_when_they_are_cut_short() -> None:
    assert template_arguments(r'{"a": "\ud83d') == r'{"a": "\ud83d'
