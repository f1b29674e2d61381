"""Finds the end of a text that may be the beginning of a longer one, such as a stop string."""

from __future__ import annotations

from collections.abc import Iterable


def partial_match(text: str, patterns: Iterable[str]) -> int:
    """Start of the longest suffix of `text` that is a proper prefix of a pattern; len(text) if there is none.

    The first character of a pattern is searched for, which is fast where it is rare.
    """
    earliest = len(text)
    for pattern in patterns:
        start = text.find(pattern[0], max(0, len(text) - len(pattern) + 1), earliest)
        while start >= 0 and not pattern.startswith(text[start:]):
            start = text.find(pattern[0], start + 1, earliest)
        earliest = earliest if start < 0 else start
    return earliest
