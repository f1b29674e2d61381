from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from engine.core.protocols.partial_json import STEPS_AT_A_TIME, completing

TEXTS = st.text(alphabet='"\\{}[],: a1\né', max_size=4)
SCALARS = st.sampled_from([None, True, False, 0, -1.5e300, 12]) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)


def complete(text: str) -> str:
    """The completed text."""
    return _driven(text)[0]


def _driven(text: str) -> tuple[str, int]:
    """The completed text, and the number of pauses."""
    steps, pauses = completing(text), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return str(end.value), pauses
        pauses += 1


def is_beginning(part: Any, whole: Any) -> bool:
    """Whether a value is another one, perhaps without its last members or elements."""
    if isinstance(part, dict) and isinstance(whole, dict):
        names = list(part)
        return names == list(whole)[: len(names)] and all(is_beginning(part[name], whole[name]) for name in names)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(is_beginning, part, whole))
    return bool(part == whole)


@given(OBJECTS, st.booleans(), st.data())
@settings(deadline=None, max_examples=60)
def test_a_beginning_of_an_object_becomes_its_complete_members(value: Any, spaced: bool, data: st.DataObject) -> None:
    text = json.dumps(value, indent=1 if spaced else None)
    assert complete(text) == text
    cut = data.draw(st.integers(0, len(text)))
    assert is_beginning(json.loads(complete(text[:cut])), value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "{}"),
        ("[1", "{}"),
        ("{", "{}"),
        ('{"city', "{}"),
        ('{"city": "Ro', "{}"),
        ('{"city": "Rome"', '{"city": "Rome"}'),
        ('{"city": "Rome", "days": 1', '{"city": "Rome"}'),
        ('{"city": "Rome", "days": 1,', '{"city": "Rome", "days": 1}'),
        ('{"a": [{"b": "\\"}", "c": tru', '{"a": [{"b": "\\"}"}]}'),
        ('{"a": {}} more', '{"a": {}}'),
    ],
)
def test_what_is_incomplete_is_left_out(text: str, expected: str) -> None:
    assert complete(text) == expected


def test_the_time_is_proportional_to_the_text() -> None:
    text = '{"a": [' * 20_000 + "1"
    assert complete(text) == '{"a": [' * 20_000 + "]}" * 20_000


def test_a_long_text_is_completed_with_pauses() -> None:
    assert _driven('{"a": 1')[1] == 0
    assert _driven('{"a":' * 10 * STEPS_AT_A_TIME)[1] == 30
