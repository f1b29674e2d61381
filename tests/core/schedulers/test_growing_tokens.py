"""Tokens that grow behave as the list of all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from engine.core.schedulers.growing_tokens import GrowingTokens
from engine.core.tokens import Tokens

ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12)
slices = st.slices(24)


@settings(deadline=None)
@given(ids, ids, slices)
def test_growing_tokens_are_their_head_and_their_tail(head: list[int], tail: list[int], part: slice) -> None:
    tokens = GrowingTokens(Tokens(head))
    tokens.tail += tail
    assert list(tokens) == list(tokens.known()) == head + tail
    assert [tokens[index] for index in range(-len(tokens), len(tokens))] == (head + tail) * 2
    assert tokens[part] == tuple((head + tail)[part])
    begin, end = sorted(abs(at) for at in part.indices(len(tokens))[:2])
    assert tokens.packed(begin, end) == bytes(Tokens((head + tail)[begin:end]).pack())
    with pytest.raises(IndexError):
        tokens[len(tokens)]


def test_all_of_tokens_that_have_not_grown_is_no_copy() -> None:
    tokens = GrowingTokens(Tokens([1, 2]))
    assert tokens[:] is tokens.known() is tokens.head
