"""Packed token ids behave as the tuples and lists that they stand for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from engine.core.tokens import TOKEN_BYTES, Tokens

ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12)
slices = st.slices(12)


@settings(deadline=None)
@given(ids, slices)
def test_tokens_are_a_sequence(given_ids: list[int], part: slice) -> None:
    tokens = Tokens(given_ids)
    assert (list(tokens), len(tokens), list(reversed(tokens))) == (given_ids, len(given_ids), given_ids[::-1])
    assert [tokens[index] for index in range(-len(tokens), len(tokens))] == given_ids * 2
    assert tokens == Tokens(tuple(given_ids)) == Tokens(iter(given_ids)) == Tokens(tokens)
    assert tokens[part] == Tokens(given_ids[part]) == tuple(given_ids[part])
    assert (tokens == tuple(given_ids), hash(tokens)) == (True, hash(tuple(given_ids)))
    assert tokens != Tokens([*given_ids, 0])
    assert eval(repr(tokens), {"Tokens": Tokens}) == tokens


@settings(deadline=None)
@given(ids, ids)
def test_packed_tokens_are_bytes_that_give_the_tokens_again(first: list[int], second: list[int]) -> None:
    packed = bytes(Tokens(first).pack()) + bytes(Tokens(second).pack())
    assert len(packed) == TOKEN_BYTES * (len(first) + len(second))
    assert Tokens.unpack(packed) == Tokens.join([Tokens(first), second]) == Tokens(first + second)


def test_what_is_no_int32_is_refused() -> None:
    with pytest.raises(OverflowError):
        Tokens([2**31])
    with pytest.raises(TypeError):
        Tokens(["a"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        Tokens((1, 1.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple"):
        Tokens.unpack(b"123")
