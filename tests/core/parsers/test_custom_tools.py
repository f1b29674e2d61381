"""The input of a custom tool, from the arguments of its call."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, settings, strategies as st

from engine.core.parsers import CustomInput, custom_parameters


@given(st.text(max_size=12), st.lists(st.integers(0, 60), max_size=4), st.booleans())
@settings(deadline=None, max_examples=60)
def test_the_input_comes_back_however_it_is_cut(text: str, cuts: list[int], ascii_only: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    ends = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    made = CustomInput()
    assert "".join(made.feed(arguments[a:b]) for a, b in itertools.pairwise(ends)) == text


def test_half_of_a_pair_becomes_a_replacement_character() -> None:
    assert "".join(map(CustomInput().feed, '{"input": "a\\ud83ex\\udd80"}')) == "a\ufffdx\ufffd"


def test_what_is_cut_short_is_read_up_to_there() -> None:
    assert CustomInput().feed('{"input": "ab\\') == "ab"


def test_other_arguments_than_input_are_passed_on_unchanged() -> None:
    assert "".join(map(CustomInput().feed, '{"text": 1}')) == '{"text": 1}'


def test_a_pattern_is_that_of_the_whole_input() -> None:
    assert custom_parameters("a|b")["properties"]["input"]["pattern"] == "^(?:a|b)$"


def test_white_space_stands_anywhere_but_in_the_name() -> None:
    assert "".join(map(CustomInput().feed, ' {\n "input"\t: "a b" }')) == "a b"
    assert "".join(map(CustomInput().feed, '{"in put": "a"}')) == '{"in put": "a"}'
    assert CustomInput().feed('{ "inp') == ""


def test_white_space_before_the_input_is_not_read_again() -> None:
    made = CustomInput()
    assert [made.feed(piece) for piece in ("{", *[" " * 9] * 3)] == [""] * 4
    assert made._before == ["{", *[" " * 9] * 3]
    assert made.feed('"input":"a') == "a"
