"""Proposes from the output that a client predicts: follows it, and finds the place again after each difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.core.tokens import Tokens

IdsT = TypeVar("IdsT", int, npt.NDArray[np.int64])
_MIN_AGREEMENT = 2
"""Last tokens of the output that must stand before a place for it to be proposed from."""
_MAX_AGREEMENT = 16
"""Maximum tokens before a place that are compared; more would not make the place more likely."""
_AHEAD = 8
_BEHIND = 4
"""Maximum occurrences of the last tokens that are compared, ahead of the last right place and behind it."""


class PredictedOutput:
    """Finds where the output of one request stands in its prediction, and proposes what comes next there.

    The beginning is proposed first. Where the output differs, the places where its last two tokens stand in the
    prediction are compared, a few ahead of the last place that was right and a few behind: the one that agrees in most
    tokens is followed, of several the next one. An output that leaves out, inserts or replaces some tokens is thus
    followed again two tokens later. The time per token does not depend on the length of the prediction, which is
    indexed once, at the first difference.
    """

    def __init__(self, prediction: Tokens) -> None:
        self._prediction = prediction
        self._known = 0
        """Tokens of the output that were compared."""
        self._place = 0
        """The next token of the prediction, if the output follows it."""
        self._follows = True
        self._right = 0
        """Tokens that were right since the place was found."""
        self._anchor = 0
        """The place up to which the output followed the prediction last."""
        self._pairs: npt.NDArray[np.int64] | None = None
        """Sorted; for each pair of adjacent tokens that another token follows, `_key` of the pair plus the place after
        it."""
        self._base = 0
        """Above all tokens of the prediction."""
        self.proposed = False
        """Whether the latest proposal had a token."""

    def propose(self, output: Sequence[int], limit: int) -> Sequence[int]:
        """The next tokens of the prediction, at most `limit`; empty if the output is not found in it.

        output: so far; grows between calls, and never changes otherwise.
        """
        prediction, end = self._prediction, len(output)
        for at in range(self._known, end):
            self._follow(output[at])
        self._known = end
        if not self._follows:
            self._find(output)
        found = prediction[self._place : self._place + limit] if self._follows else ()
        self.proposed = bool(found)
        return found

    def _follow(self, token: int) -> None:
        """Go on by one token of the output."""
        if not self._follows:
            return
        if self._place < len(self._prediction) and self._prediction[self._place] == token:
            self._place += 1
            self._right += 1
            return
        if self._right >= _MIN_AGREEMENT:  # else the place was found by chance
            self._anchor = self._place
        self._follows, self._right = False, 0

    def _find(self, output: Sequence[int]) -> None:
        """Find the place in the prediction that the output has come to, if there is one."""
        if len(output) < _MIN_AGREEMENT or len(self._prediction) <= _MIN_AGREEMENT:
            return
        if self._pairs is None:
            self._pairs = self._index()
        if max(output[-2:]) >= self._base:
            return
        key = self._key(*output[-2:])
        bounds = (key, key + self._anchor, key + len(self._prediction))
        first, next_one, last = self._pairs.searchsorted(bounds).tolist()
        if first == last:
            return
        most = 0
        for number in (
            *range(next_one, min(next_one + _AHEAD, last)),
            *range(next_one - 1, max(next_one - 1 - _BEHIND, first - 1), -1),
        ):
            place = int(self._pairs[number]) - key
            agreement = self._agreement(output, place)
            if agreement > most:
                most, self._place = agreement, place
        self._follows = True

    def _agreement(self, output: Sequence[int], place: int) -> int:
        """How many of the output's last tokens equal those before a place; at least two do."""
        found, longest = _MIN_AGREEMENT, min(_MAX_AGREEMENT, len(output), place)
        while found < longest and self._prediction[place - found - 1] == output[-found - 1]:
            found += 1
        return found

    def _index(self) -> npt.NDArray[np.int64]:
        tokens = np.frombuffer(self._prediction.pack(), np.int32).astype(np.int64)
        self._base = int(tokens.max()) + 1
        pairs = self._key(tokens[:-2], tokens[1:-1]) + np.arange(2, len(tokens))
        pairs.sort()
        return pairs

    def _key(self, first: IdsT, second: IdsT) -> IdsT:
        return (first * self._base + second) * len(self._prediction)
