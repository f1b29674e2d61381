"""Token ids in four bytes each: sequences of ints that are copied, compared, hashed and sent as bytes.

A list of 100,000 ints takes milliseconds to make, to check and to send; as bytes these are microseconds.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import overload

TOKEN_TYPE = "i"
"""Typecode of the arrays: int32, in the machine's byte order."""
TOKEN_BYTES = array(TOKEN_TYPE).itemsize


def packed(ids: Sequence[int]) -> bytes:
    """Token ids as the bytes of `Tokens.pack`. Raises TypeError or OverflowError for an id that is no int32."""
    try:
        return _form(len(ids)).pack(*ids)  # takes half the time of an array
    except struct.error:
        return array(TOKEN_TYPE, ids).tobytes()  # which says what is wrong


@lru_cache(64)
def _form(count: int) -> struct.Struct:
    """Packs this many tokens."""
    return struct.Struct(f"{count}{TOKEN_TYPE}")


class Tokens(Sequence[int]):
    """Token ids that never change. Equal to tuples of the same ids; slices are Tokens."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int] = ()) -> None:
        """Pack token ids. Raises TypeError or OverflowError for an id that is no int32."""
        self._ids: array[int]
        if type(ids) is Tokens:
            self._ids = ids._ids
        else:
            self._ids = array(TOKEN_TYPE, packed(ids) if isinstance(ids, (list, tuple)) else ids)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Tokens:
        """The tokens of `pack`. Raises ValueError for bytes that are not a whole number of tokens."""
        tokens = cls()
        tokens._ids.frombytes(data)
        return tokens

    @classmethod
    def join(cls, parts: Iterable[Sequence[int]]) -> Tokens:
        """The tokens of all parts, one after another."""
        tokens = cls()
        for part in parts:
            tokens._ids.extend(part._ids if isinstance(part, Tokens) else part)
        return tokens

    def pack(self) -> memoryview:
        """The tokens as bytes."""
        return memoryview(self._ids).cast("B")

    def packed(self, start: int, stop: int) -> bytes:
        """The bytes of the tokens from `start` to `stop`."""
        return self._ids[start:stop].tobytes()

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Tokens: ...
    def __getitem__(self, index: int | slice) -> int | Tokens:
        found = self._ids[index]
        if isinstance(found, int):
            return found
        tokens = Tokens.__new__(Tokens)
        tokens._ids = found
        return tokens

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tokens):
            return self._ids == other._ids
        return tuple(self._ids) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._ids))

    def __repr__(self) -> str:
        return f"Tokens({self._ids.tolist()})"
