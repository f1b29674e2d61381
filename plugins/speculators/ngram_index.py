"""Finds an earlier occurrence of the last tokens of a growing sequence, in constant time per token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.core.tokens import TOKEN_TYPE, Tokens, packed

MAX_N = 16
"""Maximum length of an n-gram."""
_SLOTS_PER_TOKEN = 4
"""Slots of a table per token that it has room for; with fewer, more n-grams overwrite each other."""
_MIN_ROOM = 256
"""Minimum room of a new index, in tokens."""
_BULK = 32
"""From this number of n-grams on, numpy indexes them faster than a loop."""
_WORD = 2**64 - 1
_FACTORS = tuple((0x9E3779B97F4A7C15 * (2 * number + 1) ** 5) & _WORD | 1 for number in range(MAX_N))
"""Multipliers of the tokens of an n-gram, from the last one back."""


class NgramIndex:
    """The n-grams of one sequence, each with the place after its latest occurrence.

    There is a table per n, which holds the place in the slot of the n-gram's hash. Another n-gram whose hash has the
    same slot overwrites it, so a place is compared with the tokens before it is used. The tables double with the
    sequence, up to 2 * `context` tokens; then the first tokens are dropped, down to `context`. So memory is at most
    (8 + 32 * len(sizes)) * context bytes if `context` is a power of two from 128 on, else (8 + 64 * len(sizes)) *
    context bytes.

    A place whose preceding tokens agree with the last tokens in the length of the longest n-gram is followed, without a
    look-up, until a token differs: a look-up could not find a place that agrees in more.
    """

    def __init__(self, sizes: Sequence[int], *, context: int) -> None:
        """sizes: the values of n, the largest first. context: minimum number of last tokens that are indexed."""
        self._sizes = tuple(sizes)
        self._context = context
        self._tokens = array(TOKEN_TYPE)
        self._dropped = 0
        """Tokens of the sequence before those of `_tokens`."""
        self._room = 0
        """Tokens that the tables have slots for."""
        self._shift = 64
        self._tables: tuple[npt.NDArray[np.int32], ...] = ()
        self._indexed = 0
        """The tables have the n-grams that end before this place of `_tokens`, and before all earlier places."""
        self._source = 0
        """The place that is continued; 0: none."""
        self._followed = 0
        """Number of tokens before `_source` that are known to agree with the last tokens."""
        self._compared = 0
        """The place up to which tokens were compared with those at `_source`."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the tokens of the sequence that are new since the last call. tokens: all of the sequence."""
        known, count = self._dropped + len(self._tokens), len(tokens)
        if count - known > self._context:  # the known tokens, or the first of the new ones, are outside the context
            known = self._dropped = count - self._context
            self._tokens, self._room, self._source = array(TOKEN_TYPE), 0, 0
        if count - known == 1:
            self._tokens.append(tokens[known])
        elif count > known:
            new = tokens[known:]
            self._tokens.frombytes(new.pack() if isinstance(new, Tokens) else packed(new))

    @property
    def agreement(self) -> int:
        """Number of the last tokens that are known to agree with those before the latest continuation."""
        return self._followed if self._source else 0

    def last(self, count: int) -> array[int]:
        """The last tokens, at most `count`."""
        return self._tokens[-count:]

    def tokens_from(self, start: int) -> array[int]:
        """The tokens from the place `start` of the sequence on, as far as they are still known."""
        return self._tokens[max(start - self._dropped, 0) :]

    def continuation(self, limit: int) -> list[int]:
        """What followed the last tokens at an earlier occurrence: at most `limit` tokens, empty if there is none.

        A continuation that reaches the end of the sequence goes on from its own beginning, as a repetition does.
        """
        place = self._place() if self._tokens else 0
        if not place:
            return []
        found = self._tokens[place : place + limit].tolist()
        while len(found) < limit:
            found += found[: limit - len(found)]
        return found

    def _place(self) -> int:
        """The place to be continued; 0: there is none."""
        tokens, end = self._tokens, len(self._tokens)
        if self._source:
            while self._compared < end and tokens[self._source] == tokens[self._compared]:
                self._source += 1
                self._compared += 1
                self._followed += 1
            if self._compared == end and self._followed >= self._sizes[0]:
                return self._source
        self._index()
        tokens, end = self._tokens, len(self._tokens)
        for n, table in zip(self._sizes, self._tables, strict=True):
            place = int(table[self._slot(end, n)]) if end > n else 0
            if place and tokens[place - n : place] == tokens[end - n :]:
                self._source, self._followed, self._compared = place, n, end
                return place
        self._source = 0
        return 0

    def _slot(self, end: int, n: int) -> int:
        """The slot of the n-gram before the place `end`."""
        code = 0
        for back in range(n):
            code += (self._tokens[end - 1 - back] + 1) * _FACTORS[back]
        return (code & _WORD) >> self._shift

    def _index(self) -> None:
        """Index all n-grams but the last one, which nothing follows yet."""
        if len(self._tokens) > self._room:
            self._enlarge()
        start, stop = self._indexed, len(self._tokens) - 1
        for n, table in zip(self._sizes, self._tables, strict=True):
            first = max(start + 1, n)
            if stop - first >= _BULK:
                slots = self._slots(first, stop, n)
                table[slots] = np.arange(first, stop + 1, dtype=np.int32)  # of equal slots, the last assignment stays
            else:
                for place in range(first, stop + 1):
                    table[self._slot(place, n)] = place
        self._indexed = stop

    def _slots(self, first: int, last: int, n: int) -> npt.NDArray[np.int64]:
        """The slots of the n-grams before the places from `first` to `last`."""
        tokens = np.array(self._tokens[first - n : last], np.uint64) + 1
        codes = np.zeros(last - first + 1, np.uint64)
        for back in range(n):
            codes += tokens[n - 1 - back : len(tokens) - back] * np.uint64(_FACTORS[back])
        return (codes >> np.uint64(self._shift)).astype(np.int64)

    def _enlarge(self) -> None:
        """Keep only the last `context` tokens if there are 2 * context; make empty tables for twice the tokens."""
        if len(self._tokens) >= 2 * self._context:
            excess = len(self._tokens) - self._context
            del self._tokens[:excess]
            self._dropped += excess
            self._source = 0
        self._room = max(_MIN_ROOM, min(2 * len(self._tokens), 2 * self._context))
        slots = 1 << (self._room * _SLOTS_PER_TOKEN - 1).bit_length()
        self._shift = 65 - slots.bit_length()
        self._tables = tuple(np.zeros(slots, np.int32) for _ in self._sizes)
        self._indexed = 0
