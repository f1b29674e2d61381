"""Custom tools, which take a plain text: the model sees functions with one argument."""

from __future__ import annotations

import json
import re
from typing import Any, Final

INPUT: Final = "input"
"""Name of the argument."""
_BEGIN: Final = f'{{"{INPUT}":"'
_BEGIN_PATTERN: Final = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_DECODABLE: Final = re.compile(
    r"(?:[^\"\\]"
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
    """The input of a custom tool, from the arguments of its call. What is not of that form is returned as it is."""

    def __init__(self) -> None:
        self._unread = ""
        self._begun = False
        self._plain = False
        self._ended = False

    def feed(self, arguments: str) -> str:
        """The text that a further piece of the arguments stands for."""
        if self._ended:
            return ""
        self._unread += arguments
        if not self._begun and not self._plain:
            found = _BEGIN_PATTERN.match(self._unread)
            if found is not None:
                self._begun, self._unread = True, self._unread[found.end() :]
            elif _BEGIN.startswith("".join(self._unread.split())):
                return ""
            else:
                self._plain = True
        if self._plain:
            plain, self._unread = self._unread, ""
            return plain
        end = len(_DECODABLE.match(self._unread)[0])  # type: ignore[index]  # it may match nothing
        raw, self._unread = self._unread[:end], self._unread[end:]
        self._ended = self._unread.startswith('"')
        text: str = json.loads(f'"{raw}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
