"""The object of JSON text that ends early, as the arguments of a tool call that was cut short."""

from __future__ import annotations

import re
from collections.abc import Generator
from itertools import count

_TOKEN = re.compile(r'\s*(?:("[^"\\]*(?:\\.[^"\\]*)*")|([{}\[\],:])|([^\s"{}\[\],:]+))', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}


STEPS_AT_A_TIME = 1000
"""Tokens of JSON that are read without a pause."""


def completing(text: str) -> Generator[None, None, str]:
    """The JSON text of the object that `text` begins, with the members and elements that are complete.

    Yields after each millisecond or so of work.

    text: a beginning of a JSON object. A number or word at its very end does not count as complete, because it may go
    on. Text of another kind gives an empty object.
    """
    if not text.lstrip().startswith("{"):
        return "{}"
    closing: list[str] = []
    """Closing marks of the containers that are open at `kept`."""
    kept = position = 0
    is_key = False
    for step in count(1):
        match = _TOKEN.match(text, position)
        if match is None:
            break
        if step % STEPS_AT_A_TIME == 0:
            yield
        position = match.end()
        string, mark, word = match.groups()
        if mark in _CLOSING:
            closing.append(_CLOSING[mark])
            is_key = mark == "{"
        elif mark in (",", ":"):
            is_key = mark == "," and closing[-1] == "}"
            continue
        elif mark is not None:
            closing.pop()
        elif (string is not None and is_key) or (word is not None and position == len(text)):
            continue
        kept = position
        if not closing:
            break
    return text[:kept] + "".join(reversed(closing))
