"""Finds the end of a JSON value in text that comes in pieces, and the first character that breaks the syntax."""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
"""Characters of a string that stand for themselves."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_PART = re.compile(r"[-+.eE0-9]+")
_LITERALS = {"t": ("rue", "true"), "f": ("alse", "false"), "n": ("ull", "null")} | {
    "T": ("rue", "true"),
    "F": ("alse", "false"),
    "N": ("one", "null"),
}
"""First character of a literal, in JSON or Python -> the rest of it, and the literal in JSON."""
_ESCAPED = '"\\/bfnrt'


class _State(Enum):
    """What may come next."""

    VALUE = auto()
    VALUE_OR_END = auto()
    """After "["."""
    KEY = auto()
    KEY_OR_END = auto()
    """After "{"."""
    COLON = auto()
    NEXT_OR_END = auto()
    """After a value in a container."""
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()
    DONE = auto()
    FAILED = auto()


class JsonScanner:
    """Reads one JSON value, without spaces before it, a piece of text at a time.

    What models write and JSON forbids becomes JSON: line breaks and other control characters in strings, the escape
    \\', Python's True, False and None, and a comma after the last element. The time is proportional to the text;
    only characters whose JSON form depends on the next ones are kept.
    """

    def __init__(self) -> None:
        self._state = _State.VALUE
        self._containers: list[str] = []
        self._is_key = False
        """Whether the string being read is a key."""
        self._rest = self._meant = ""
        """The rest of the literal being read, and the literal in JSON."""
        self._held: list[str] = []
        """Characters read whose JSON form depends on the next ones: a comma and the spaces after it, the beginning of a
        literal, or a backslash."""
        self._digits = 0
        """Hexadecimal digits that must follow."""
        self._number: list[str] = []
        """The pieces of the number being read."""

    @property
    def done(self) -> bool:
        """Whether the value is complete. A number is complete only when something else follows it."""
        return self._state is _State.DONE

    @property
    def failed(self) -> bool:
        """Whether the text is not JSON, from where `feed` has stopped."""
        return self._state is _State.FAILED

    def feed(self, text: str, at: int = 0) -> tuple[int, str]:
        """Read on from position `at` of `text`.

        Returns the position after the last character that is part of the value, and the characters read, as JSON.
        Characters whose JSON form depends on the next ones are returned by a later call; until then `held` has them.
        """
        found: list[str] = []
        while at < len(text) and not (self.done or self.failed):
            end = self._run(text, at)
            if end > at:
                found.append(text[at:end])
                at = end
                continue
            character = text[at]
            piece = self._step(character)
            if piece is None:
                continue  # the state has changed, and the character has not been read
            found.append(piece)
            at += 1
        if self.failed:
            found.append(self._take_held())
        return at, "".join(found)

    @property
    def held(self) -> str:
        """Characters read that `feed` has not returned yet."""
        return "".join(self._held)

    def _take_held(self) -> str:
        held = self.held
        self._held.clear()
        return held

    def _run(self, text: str, at: int) -> int:
        """The end of the characters that can be read together and change no state."""
        if self._state is _State.STRING and (match := _PLAIN.match(text, at)):
            return match.end()
        if self._state is _State.NUMBER and (match := _NUMBER_PART.match(text, at)):
            self._number.append(match[0])
            return match.end()
        return at

    def _step(self, character: str) -> str | None:
        """Read one character; returns it as JSON, or None if it is not part of what was being read."""
        match self._state:
            case _State.STRING:
                return self._in_string(character)
            case _State.ESCAPE:
                return self._escape(character)
            case _State.HEX:
                self._digits -= 1
                if character not in "0123456789abcdefABCDEF":
                    self._state = _State.FAILED
                elif not self._digits:
                    self._state = _State.STRING
            case _State.LITERAL:
                return self._in_literal(character)
            case _State.NUMBER:
                if _NUMBER.fullmatch("".join(self._number)):
                    self._end_value()
                else:
                    self._state = _State.FAILED
                return None
            case _ if character in _SPACE and self._containers:
                if self._held:
                    return self._hold(character)
            case _:
                return self._structure(character)
        return None if self.failed else character

    def _hold(self, character: str) -> str:
        """Read a character whose JSON form depends on the next ones."""
        self._held.append(character)
        return ""

    def _escape(self, character: str) -> str | None:
        """Read the character after a backslash."""
        if character not in _ESCAPED + "u'":
            self._state = _State.FAILED
            return None
        self._digits = 4
        self._state = _State.HEX if character == "u" else _State.STRING
        backslash = self._take_held()
        return character if character == "'" else backslash + character

    def _in_literal(self, character: str) -> str | None:
        if not self._rest.startswith(character):
            self._state = _State.FAILED
            return None
        self._rest = self._rest[1:]
        if self._rest:
            return self._hold(character)
        self._held.clear()
        self._end_value()
        return self._meant

    def _in_string(self, character: str) -> str:
        if character == "\\":
            self._state = _State.ESCAPE
            return self._hold(character)
        if character != '"':
            return f"\\u{ord(character):04x}"
        if self._is_key:
            self._is_key, self._state = False, _State.COLON
        else:
            self._end_value()
        return character

    def _structure(self, character: str) -> str | None:
        """Read a character outside of strings, numbers and literals."""
        state = self._state
        ends = state in (_State.NEXT_OR_END, _State.KEY_OR_END, _State.VALUE_OR_END) or bool(self._held)
        if ends and character == self._containers[-1]:
            self._containers.pop()
            self._end_value()
            return self._take_held().removeprefix(",") + character
        if state is _State.NEXT_OR_END and character == ",":
            self._state = _State.KEY if self._containers[-1] == "}" else _State.VALUE
            return self._hold(character)
        if state in (_State.KEY, _State.KEY_OR_END) and character == '"':
            self._is_key, self._state = True, _State.STRING
        elif state is _State.COLON and character == ":":
            self._state = _State.VALUE
        elif state in (_State.VALUE, _State.VALUE_OR_END):
            return self._begin_value(character)
        else:
            self._state = _State.FAILED
            return None
        return self._take_held() + character

    def _begin_value(self, character: str) -> str | None:
        before = self.held
        if character == "{":
            self._containers.append("}")
            self._state = _State.KEY_OR_END
        elif character == "[":
            self._containers.append("]")
            self._state = _State.VALUE_OR_END
        elif character == '"':
            self._state = _State.STRING
        elif character in _LITERALS:
            self._rest, self._meant = _LITERALS[character]
            self._state = _State.LITERAL
            self._held = [character]
            return before
        elif character in "-0123456789":
            self._number, self._state = [character], _State.NUMBER
        else:
            self._state = _State.FAILED
            return None
        self._held.clear()
        return before + character

    def _end_value(self) -> None:
        self._state = _State.NEXT_OR_END if self._containers else _State.DONE
