"""Digests of the code of autotuned kernels."""

from __future__ import annotations

import pytest

from engine.core.autotune.op import code_of

SOURCE = '''"""A module."""

TILE = 64
"""The rows of a tile."""


def name(tile):  # of a tile
    """Name a tile.

    With # and all.
    """
    return f"#{tile} 'of' {TILE}"  # it has a "#"
'''


def test_code_has_no_comments_docstrings_and_empty_lines() -> None:
    assert code_of(SOURCE).splitlines() == ["TILE = 64", "def name(tile):", """    return f"#{tile} 'of' {TILE}\""""]


def test_code_keeps_statements_when_they_share_a_line_with_a_string() -> None:
    source = 'def f(n): "doc"; return n * 2\nx = 1; """A\nB"""; "ä"; y = "ü"  # z\n'
    assert code_of(source).splitlines() == ["def f(n): ; return n * 2", 'x = 1; ; ; y = "ü"']


@pytest.mark.parametrize("character", ["\f", "\v", "\x1c", "\x85", "\u2028"])
def test_code_keeps_lines_when_a_string_has_what_unicode_breaks_lines_at(character: str) -> None:
    source = f'x = "{character}"\ny = 1  # of x\n"""The y."""\nz = 2\n'
    assert code_of(source).split("\n") == [f'x = "{character}"', "y = 1", "z = 2", ""]


def test_code_differs_where_a_string_in_it_differs() -> None:
    assert code_of(SOURCE) != code_of(SOURCE.replace("'of'", "'in'"))
