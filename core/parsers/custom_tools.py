"""Custom tools, which take a plain text: the model sees functions with one argument."""

from __future__ import annotations

import json
import re
from typing import Any, Final

INPUT: Final = "input"
"""Name of the argument."""
_BEGIN: Final = f'{{"{INPUT}":"'
_WITHIN_NAME: Final = frozenset(_BEGIN[at:] for at in range(2, 3 + len(INPUT)))
"""Ends of _BEGIN before which no white space may stand."""
_DECODABLE: Final = re.compile(
    r"(?:[^\"\\]++"
    r"|\\[\"\\/bfnrt]"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u(?:[^dD]|[dD][^c-fC-F])))"
    r")*",
    re.DOTALL,
)
"""Characters and escapes of a string in JSON that stand for characters, whatever follows."""


def custom_parameters(pattern: str | None = None) -> dict[str, Any]:
    """The schema of the function that stands for a custom tool.

    pattern: a regular expression that the whole input must match; None: any text.
    """
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


class CustomInput:
    """The input of a custom tool, from the arguments of its call. Arguments of another form are returned unchanged."""

    def __init__(self) -> None:
        self._unread = ""
        self._before: list[str] = []
        """What has come before the input."""
        self._awaited = _BEGIN
        """What must still come before the input; empty: it has begun."""
        self._plain = False
        self._ended = False

    def feed(self, arguments: str) -> str:
        """The text that a further piece of the arguments stands for."""
        if self._ended:
            return ""
        if self._awaited:
            arguments = self._begin(arguments)
        if self._plain or self._awaited:
            return arguments
        self._unread += arguments
        end = len(_DECODABLE.match(self._unread)[0])  # type: ignore[index]  # it may match nothing
        raw, self._unread = self._unread[:end], self._unread[end:]
        self._ended = self._unread.startswith('"')
        text: str = json.loads(f'"{raw}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _begin(self, arguments: str) -> str:
        """Read up to the input; returns what follows, or all of the text so far if it is not of the form."""
        for at, character in enumerate(arguments):
            if character == self._awaited[0]:
                self._awaited = self._awaited[1:]
                if not self._awaited:
                    return arguments[at + 1 :]
            elif not character.isspace() or self._awaited in _WITHIN_NAME:
                self._plain, self._awaited = True, ""
                return "".join((*self._before, arguments))
        self._before.append(arguments)  # joined only once, however much white space there is
        return ""
