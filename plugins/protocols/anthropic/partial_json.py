"""The object of JSON text that ends early, as the arguments of a tool call that was cut short."""

from __future__ import annotations

import re

_TOKEN = re.compile(r'\s*(?:("[^"\\]*(?:\\.[^"\\]*)*")|([{}\[\],:])|([^\s"{}\[\],:]+))', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}


def complete(text: str) -> str:
    """The JSON text of the object that `text` begins, with the members and elements that are complete.

    text: a beginning of a JSON object. A number or word at its very end does not count as complete, because it may go
    on. Text of another kind gives an empty object.
    """
    if not text.lstrip().startswith("{"):
        return "{}"
    closing: list[str] = []
    """Of the open containers. What comes after `kept` neither opens nor closes one."""
    kept = position = 0
    is_key = False
    while match := _TOKEN.match(text, position):
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
