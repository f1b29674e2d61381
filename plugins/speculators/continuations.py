"""An index, of bounded size, of what followed n-grams in earlier texts, with counts as confidence."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.core.tokens import TOKEN_TYPE

_END = -1
"""Separator after each text."""
_MAX_PLACES = 8
"""Maximum places of an n-gram that are counted, the latest first."""
_MAX_LOOKS = 16
"""Maximum places that are compared to find _MAX_PLACES: some are of other n-grams with the same slot."""
_FACTOR = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


class Continuations:
    """Finds what followed given tokens in texts, of which the oldest are forgotten.

    The index has two halves, each of `max_tokens` / 2. When the newer one is full, the older one is dropped, the newer
    one becomes the older, and an empty one the newer. So no time is spent on removing tokens. Memory: at most 60 bytes
    per token.
    """

    def __init__(self, sizes: Sequence[int], max_tokens: int) -> None:
        """sizes: numbers of tokens that can be looked up."""
        self._sizes = tuple(sizes)
        self._room = max_tokens // 2
        self._halves = [_Half(self._sizes, self._room)]

    def __len__(self) -> int:
        return sum(len(half.tokens) for half in self._halves)

    def add(self, text: array[int]) -> None:
        """Add a text; of a very long one only the end."""
        text = text[-(self._room - 1) :]
        if not self._halves[0].has_room(len(text) + 1):
            self._halves = [_Half(self._sizes, self._room), self._halves[0]]
        self._halves[0].add(text)

    def continuation(self, last: array[int], limit: int, least: float) -> list[int]:
        """What most often followed the tokens `last`, at most `limit` tokens; empty if they are not in the index.

        last: as many tokens as one of `sizes`. Each token must have followed all before it at a share of at least
        `least` of the places of `last`, to which one place is added where something else followed.
        """
        for half in self._halves:
            places = half.places(last)
            if places:
                return _most_common(half.tokens, places, limit, least)
        return []


def _most_common(tokens: array[int], places: list[int], limit: int, least: float) -> list[int]:
    """What most often follows the places in `tokens`."""
    total = len(places) + 1
    found: list[int] = []
    for ahead in range(limit):
        if len(places) == 1:
            if 1 / total >= least:
                more = tokens[places[0] + ahead : places[0] + limit]
                found += more[: more.index(_END)] if _END in more else more
            break
        token, count = Counter([tokens[place + ahead] for place in places]).most_common(1)[0]
        if token == _END or count / total < least:
            break
        found.append(token)
        places = [place for place in places if tokens[place + ahead] == token]
    return found


class _Half:
    """Texts, one after another, and for each n the places after each n-gram, chained from the latest to the first."""

    def __init__(self, sizes: Sequence[int], room: int) -> None:
        self.tokens = array(TOKEN_TYPE)
        self._room = room
        slots = 1 << (2 * room - 1).bit_length()
        self._shift = 65 - slots.bit_length()
        # Zeros take no memory before they are written to.
        self._chains = {n: (np.zeros(slots, np.int32), np.zeros(room + 1, np.int32)) for n in sizes}
        """For each n the latest place in each slot, and the one before each place."""

    def has_room(self, count: int) -> bool:
        """Whether this many tokens more can be added."""
        return len(self.tokens) + count <= self._room

    def add(self, text: array[int]) -> None:
        """Add a text, for which there must be room."""
        start = len(self.tokens)
        self.tokens += text
        for n, (heads, before) in self._chains.items():
            if len(text) >= n:
                places = np.arange(start + n, start + len(text) + 1, dtype=np.int32)
                _link(heads, before, self._slots(np.array(text, np.uint64), n), places)
        self.tokens.append(_END)

    def places(self, last: array[int]) -> list[int]:
        """The latest places after the n-gram `last`, the latest first."""
        n = len(last)
        if n not in self._chains:
            return []
        heads, before = self._chains[n]
        code = 0
        for token in last:
            code = (code + token + 1) * _FACTOR & _WORD
        place = int(heads[code >> self._shift])
        found: list[int] = []
        for _ in range(_MAX_LOOKS):
            if not place or len(found) == _MAX_PLACES:
                break
            if self.tokens[place - n : place] == last:
                found.append(place)
            place = int(before[place])
        return found

    def _slots(self, text: npt.NDArray[np.uint64], n: int) -> npt.NDArray[np.int64]:
        """The slots of all n-grams of a text."""
        codes = np.zeros(len(text) - n + 1, np.uint64)
        for place in range(n):
            codes = (codes + text[place : place + len(codes)] + np.uint64(1)) * np.uint64(_FACTOR)
        return (codes >> np.uint64(self._shift)).astype(np.int64)


def _link(
    heads: npt.NDArray[np.int32],
    before: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int64],
    places: npt.NDArray[np.int32],
) -> None:
    """Put places, in order, in front of the chains of their slots."""
    order = np.argsort(slots, kind="stable")
    slots, places = slots[order], places[order]
    first = np.concatenate(([True], slots[1:] != slots[:-1]))
    last = np.concatenate((first[1:], [True]))
    before[places[1:]] = places[:-1]
    before[places[first]] = heads[slots[first]]
    heads[slots[last]] = places[last]
