"""The tokens of a request: a prompt, and an output that grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from engine.core.tokens import Tokens, packed


class GrowingTokens(Sequence[int]):
    """Tokens that never change, followed by those in the list `tail`, which grows. Slices are Tokens."""

    __slots__ = ("head", "head_len", "tail")

    def __init__(self, head: Tokens) -> None:
        self.head = head
        self.head_len = len(head)
        self.tail: list[int] = []

    def packed(self, start: int, stop: int) -> bytes:
        """The bytes of the tokens from `start` to `stop`, which must not be negative."""
        size = self.head_len
        if start >= size:
            return packed(self.tail[start - size : stop - size])
        if stop <= size:
            return self.head.packed(start, stop)
        return self.head.packed(start, size) + packed(self.tail[: stop - size])

    def known(self) -> Tokens:
        """The tokens so far."""
        return Tokens.join((self.head, self.tail)) if self.tail else self.head

    def __len__(self) -> int:
        return self.head_len + len(self.tail)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Tokens: ...
    def __getitem__(self, index: int | slice) -> int | Tokens:
        size = self.head_len
        if isinstance(index, int):
            index = range(len(self))[index]
            return self.head[index] if index < size else self.tail[index - size]
        start, stop, step = index.indices(len(self))
        if step != 1:
            return Tokens(self[at] for at in range(start, stop, step))
        if start >= size:
            return Tokens(self.tail[start - size : max(start, stop) - size])
        head = self.head if (start, stop) == (0, size) else self.head[start : min(stop, size)]
        return Tokens.join((head, self.tail[: stop - size])) if stop > size else head
