from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from engine.core.parsers.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
CUTS = st.lists(st.integers(0, 200), max_size=6).map(sorted)


def refuse(constant: str) -> None:
    """NaN is no JSON, although Python reads it."""
    raise ValueError(constant)


def scan(text: str, cuts: list[int]) -> tuple[JsonScanner, int, str]:
    """The scanner, the characters that it has read and what it made of them, for a text in pieces."""
    scanner, read, found = JsonScanner(), 0, ""
    ends = [cut for cut in cuts if cut < len(text)] + [len(text)]
    for end in ends:
        read, more = scanner.feed(text[:end], read)
        found += more
    return scanner, read, found


@given(VALUES, CUTS, st.booleans(), st.sampled_from(["", "x", "}", " ", ',"a"']))
@settings(deadline=None, max_examples=50)
def test_a_value_ends_where_json_ends(value: Any, cuts: list[int], ascii_only: bool, after: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=2 if ascii_only else None)
    scanner, read, found = scan(text + after, cuts)
    assert not scanner.failed
    assert scanner.done or (text[0] in "-0123456789" and not after)  # more digits might follow
    assert (read, found) == (len(text), text)


@given(st.text("{}[]\",:\\ntrueTFalsN'0.-eE1 \n", max_size=14), CUTS)
@settings(deadline=None, max_examples=300)
def test_what_is_done_is_json_and_what_is_not_json_is_not_done(text: str, cuts: list[int]) -> None:
    scanner, read, found = scan(text, cuts)
    whole, *others = scan(text, [])
    assert [scanner.done, scanner.held, read, found] == [whole.done, whole.held, *others]
    if scanner.done:
        json.loads(found)
    try:
        json.loads(text, strict=False, parse_constant=refuse)
    except ValueError:
        return
    assert scanner.done or text.strip()[0] in "-0123456789" or text[0].isspace()


def test_control_characters_become_escapes() -> None:
    _, _, found = scan('{"a\n": "b\t\x00c"}', [])
    assert json.loads(found) == {"a\n": "b\t\x00c"}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"a": 01}', 8),
        ('{"a": 1.}', 8),
        ("{a", 1),
        ('{"a" 1', 5),
        ("[,]", 1),
        ("[1,,]", 3),
        ("{,}", 1),
        ("[Trie]", 3),
        ("[tru1]", 4),
        ('{"a": "\\x"}', 8),
        ('{"a": tru}', 9),
    ],
)
def test_it_stops_at_what_breaks_the_syntax(text: str, read: int) -> None:
    scanner, at, found = scan(text, [])
    assert scanner.failed
    assert at == read
    assert found == text[:read]
    assert scanner.held == ""


def as_models_write(value: Any) -> str:
    """JSON with mistakes of Python's syntax."""
    if isinstance(value, str):
        return json.dumps(value).replace("'", "\\'")
    if isinstance(value, list):
        return f"[{''.join(f'{as_models_write(one)}, ' for one in value)}]"
    if isinstance(value, dict):
        return f"{{{''.join(f'{as_models_write(key)}: {as_models_write(one)},' for key, one in value.items())}}}"
    return repr(value) if value in (True, False, None) else json.dumps(value)


@given(VALUES, CUTS)
@settings(deadline=None, max_examples=50)
def test_python_in_json_becomes_json_when_it_comes_in_any_pieces(value: Any, cuts: list[int]) -> None:
    text = as_models_write([value, "it's"])
    scanner, read, found = scan(text, cuts)
    assert scanner.done
    assert read == len(text)
    assert json.loads(found) == [value, "it's"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": True, "b": [False, None]}', '{"a": true, "b": [false, null]}'),
        ('{"a": [1, 2 , \n], "b": {"c": "d",},}', '{"a": [1, 2  \n], "b": {"c": "d"}}'),
        (r"""{"it\'s": "\'\\\'\n"}""", r"""{"it's": "'\\'\n"}"""),
        ('{"True,": "None,}"}', '{"True,": "None,}"}'),
    ],
)
def test_mistakes_are_mended_only_outside_of_strings(text: str, found: str) -> None:
    scanner, _, made = scan(text, [])
    assert scanner.done
    assert made == found


@pytest.mark.parametrize(("text", "held"), [('{"a": 1, ', ", "), ('{"a": Fal', "Fal"), ('{"a": "b\\', "\\")])
def test_what_may_be_a_mistake_is_held_until_more_comes(text: str, held: str) -> None:
    scanner, read, found = scan(text, [])
    assert (read, found, scanner.held) == (len(text), text.removesuffix(held), held)
