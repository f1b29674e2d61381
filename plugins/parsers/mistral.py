"""Mistral: [TOOL_CALLS] before a JSON list of calls, or from version 11 on before each call NAME[ARGS]{...}."""

from __future__ import annotations

import secrets
import string

from engine.core.parsers import (
    CallBegin,
    CallFormat,
    Found,
    Malformed,
    Parsing,
    Steps,
    Templates,
    json_string,
    read_arguments,
    read_call,
)
from engine.plugins.parsers.tagged import Marks, Tagged, TaggedParsing

MARK, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME_CHARS = 256
"""Maximum length of what stands before the arguments."""
ID_CHARS = 9
"""Length of the ids that Mistral's templates accept: letters and digits."""


class Mistral(Tagged):
    """Calls after a special token."""

    reasoning_marks = ("[THINK]", "[/THINK]")
    special_tokens = (MARK, ARGUMENTS, CALL_ID, *reasoning_marks)

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return MARK in templates.chat

    def call_format(self) -> CallFormat:
        if ARGUMENTS in self.templates.chat:
            return CallFormat(mark=MARK, begin=lambda name: f"{MARK}{name}{ARGUMENTS}")
        return CallFormat(
            mark=MARK,
            opening=f"{MARK} [",
            begin=lambda name: f'{{"name": "{json_string(name)}", "arguments": ',
            end="}",
            separator=", ",
            closing="]",
        )

    def parsing(self, marks: Marks | None, begun: bool, tools: frozenset[str]) -> Parsing:
        return _MistralParsing(marks, begun, tools)

    def new_call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARS))


class _MistralParsing(TaggedParsing):
    """One output in this format."""

    call_mark = MARK

    def read_calls(self) -> Steps[Found]:
        at = yield from self.source.skip_space()
        first = yield from self.source.character(at)
        if first == "{":
            return (yield from read_call(self.source, bool))
        return (yield from self._list(at + 1) if first == "[" else self._named())

    def _list(self, at: int) -> Steps[Found]:
        """Read the calls of a list that begins before position `at`, and its end."""
        found = yield from read_call(self.source, bool, at)
        last = found
        while last is Found.CALL:
            at = yield from self.source.skip_space()
            follows = yield from self.source.character(at)
            goes_on = follows == ","
            if goes_on:
                at = yield from self.source.skip_space(at + 1)
                follows = yield from self.source.character(at)
            if follows == "]":  # also after a comma
                self.source.take(at + 1)
                return found
            last = (yield from read_call(self.source, bool, at)) if goes_on else Found.NOTHING
            if last is Found.NOTHING:
                yield Malformed("a list of tool calls is not closed")
        return found

    def _named(self) -> Steps[Found]:
        """Read NAME[ARGS]{...}; the id of the call may stand between, and [ARGS] be missing."""
        name_end = yield from self.source.find((ARGUMENTS, CALL_ID, "{"), NAME_CHARS)
        if name_end is None:
            return Found.NOTHING
        at, mark = name_end
        name, call_id = self.source.unread[:at].strip(), ""
        if mark == CALL_ID:
            id_end = yield from self.source.find((ARGUMENTS, "{"), NAME_CHARS)
            if id_end is None:
                return Found.NOTHING
            call_id = self.source.unread[at + len(CALL_ID) : id_end[0]].strip()
            at, mark = id_end
        if not name or any(map(str.isspace, name)):
            return Found.NOTHING
        after, ends = (at, ()) if mark == "{" else (at + len(mark), (MARK,))
        return (yield from read_arguments(self.source, CallBegin(name, call_id), after, ends))
