"""Digests of the code of autotuned kernels."""

from __future__ import annotations

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


def test_code_differs_where_a_string_in_it_differs() -> None:
    assert code_of(SOURCE) != code_of(SOURCE.replace("'of'", "'in'"))
