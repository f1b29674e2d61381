"""Reads a tool call that is a JSON object with a name and arguments, emitting the arguments as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

import msgspec

from engine.core.parsers.base import CallArguments, CallBegin, CallEnd, Event, Malformed
from engine.core.parsers.json_scanner import JsonScanner
from engine.core.parsers.sequential import Source, Steps

ARGUMENTS = ("arguments", "parameters")
"""Names that models give to the arguments."""
SILENT = ("id", "type")
"""Other keys of a call, which change nothing."""
HELD_CHARS = 2**16
"""Characters that are held until it is certain that they are a call."""


class Found(Enum):
    """What `read_call` has found."""

    CALL = auto()
    """A complete call, which is read."""
    BROKEN = auto()
    """A call whose arguments break off; it is read up to there."""
    NOTHING = auto()
    """No call; nothing is read."""


def read_call(source: Source, accepts: Callable[[str], bool], at: int = 0) -> Steps[Found]:
    """Read an object like {"name": "f", "arguments": {...}}, its keys in any order, at or after position `at`.

    accepts: whether a name is that of a call. The call begins as soon as its name and the first character of its
    arguments are known; until then nothing is read.
    """
    return (yield from _CallReader(source, accepts, at).read())


def read_arguments(source: Source, begin: CallBegin, at: int = 0, ends: Sequence[str] = ()) -> Steps[Found]:
    """Read a JSON object, which begins at or after position `at`, as the arguments of a call that `begin` begins.

    ends: marks that end a call. If one of them follows, or the model ended the output, the call has no arguments, which
    is `{}`.
    """
    at = yield from source.skip_space(at)
    first = yield from source.character(at)
    if first != "{":
        if not ((source.ended_by_model and not first) or (yield from source.starts_with_one(ends, at))):
            return Found.NOTHING
        source.take(at)
        yield from (begin, CallArguments("{}"), CallEnd())
        return Found.CALL
    source.take(at)
    yield begin
    if not (yield from _stream_value(source)):
        return Found.BROKEN
    yield CallEnd()
    return Found.CALL


def _stream_value(source: Source) -> Steps[bool]:
    """Emit a JSON object, which begins here, as arguments; whether it is complete."""
    scanner = JsonScanner()
    while True:
        end, text = scanner.feed(source.unread)
        source.take(end)
        if text:
            yield CallArguments(text)
        if scanner.done:
            return True
        if scanner.failed:
            yield Malformed("the arguments of a tool call are not JSON")
            return False
        if not (yield from source.more()):
            if scanner.held:
                yield CallArguments(scanner.held)
            yield Malformed("the output ended within the arguments of a tool call", at_end=True)
            return False


class _CallReader:
    """The state of reading one call."""

    def __init__(self, source: Source, accepts: Callable[[str], bool], at: int) -> None:
        self._source = source
        self._accepts = accepts
        self._at = at
        """The next character; after the call has begun, all before it are taken."""
        self._name: str | None = None
        self._arguments: str | None = None
        """Arguments that came before the name."""
        self._begun = False

    def read(self) -> Steps[Found]:
        """The steps of reading one call; the result says whether a call was found."""
        if not (yield from self._skip("{")):
            return Found.NOTHING
        closed = yield from self._skip("}")
        while not closed:
            key = yield from self._string()
            if key is None or not (yield from self._skip(":")):
                return (yield from self._give_up())
            found = yield from self._member(key)
            if found is not None:
                return found
            if self._begun:
                self._take()
            goes_on = yield from self._skip(",")
            closed = yield from self._skip("}")  # also after a comma
            if not (goes_on or closed):
                return (yield from self._give_up())
        if not self._begun:
            if self._name is None:
                return Found.NOTHING
            yield from self._begin(self._arguments or "{}")
        self._take()
        return Found.CALL

    def _member(self, key: str) -> Steps[Found | None]:
        """Read the value of a key; what was found if the call cannot go on."""
        self._at = yield from self._source.skip_space(self._at)
        first = yield from self._source.character(self._at)
        if key == "name" and self._name is None:
            self._name = (yield from self._string()) if first == '"' else None
            if not self._name or not self._accepts(self._name):
                return Found.NOTHING
            if self._arguments is not None:
                yield from self._begin(self._arguments)
            return None
        if key in ARGUMENTS and self._arguments is None and not self._begun:
            return (yield from self._read_arguments(first))
        value = yield from self._value()
        if value is None:
            return (yield from self._give_up())
        if key not in SILENT and self._begun:
            yield Malformed(f"a tool call has the key {key[:64]!r}, which is left out")
        elif key not in SILENT:
            return Found.NOTHING
        return None

    def _read_arguments(self, first: str) -> Steps[Found | None]:
        """Read the arguments: an object, null, or a text that holds an object."""
        if first == "{" and self._name is not None:
            self._take()
            self._begun = True
            yield CallBegin(self._name)
            if not (yield from _stream_value(self._source)):
                return Found.BROKEN
            yield CallEnd()
            return None
        value = yield from self._value()
        if value is None:
            return Found.NOTHING
        held = "{}" if value == "null" else (_decoded(value) or "").strip() if first == '"' else value
        scanner = JsonScanner()
        end, text = scanner.feed(held)
        if not text.startswith("{") or not scanner.done or end < len(held):
            return Found.NOTHING
        self._arguments = text
        if self._name is not None:
            yield from self._begin(text)
        return None

    def _begin(self, arguments: str) -> list[Event]:
        """The events of a call whose arguments are known whole."""
        assert self._name is not None
        self._begun = True
        return [CallBegin(self._name), CallArguments(arguments), CallEnd()]

    def _give_up(self) -> Steps[Found]:
        """What was found where the syntax is broken or the output ends: after its arguments, a call is complete."""
        if not self._begun:
            return Found.NOTHING
        yield Malformed("a tool call is not closed after its arguments")
        return Found.CALL

    def _skip(self, character: str) -> Steps[bool]:
        """Skip white space and, if it follows, a character; whether it did."""
        self._at = yield from self._source.skip_space(self._at)
        if (yield from self._source.character(self._at)) != character:
            return False
        self._at += 1
        return True

    def _string(self) -> Steps[str | None]:
        """Read a string; None if none follows."""
        self._at = yield from self._source.skip_space(self._at)
        if (yield from self._source.character(self._at)) != '"':
            return None
        text = yield from self._value()
        return None if text is None else _decoded(text)

    def _value(self) -> Steps[str | None]:
        """Read any value as JSON; None if none follows, or it is too long to be held."""
        scanner = JsonScanner()
        pieces: list[str] = []
        while True:
            self._at, text = scanner.feed(self._source.unread[:HELD_CHARS], self._at)
            pieces.append(text)
            if scanner.done:
                return "".join(pieces)
            if scanner.failed or self._at >= HELD_CHARS or not (yield from self._source.more()):
                return None

    def _take(self) -> None:
        """Take the characters before `_at`, all of which have been looked at."""
        self._source.take(self._at)
        self._at = 0


def _decoded(text: str) -> str | None:
    """The string that JSON stands for; None if that is not Unicode."""
    try:
        return str(msgspec.json.decode(text, type=str))
    except msgspec.DecodeError:
        return None
