"""DeepSeek V3, R1 and V3.1: calls between special tokens, their arguments as JSON, fenced or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.core.parsers import CallBegin, CallFormat, Found, Malformed, Parsing, Steps, Templates, read_arguments
from engine.plugins.parsers.tagged import Marks, Tagged, TaggedParsing

BAR, BLANK = "\uff5c", "\u2581"
"""Characters of DeepSeek's marks that look like | and _."""


def _mark(words: str) -> str:
    """A mark of these words, as it stands in a text."""
    return f"<{BAR}{words.replace(' ', BLANK)}{BAR}>"


CALLS, CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
CALL, CALL_END = _mark("tool call begin"), _mark("tool call end")
SEPARATOR = _mark("tool sep")
ENDS = (CALL_END, CALL, CALLS_END)
"""What may follow a call."""
FENCE = "```"
NAME_CHARS = 256
"""Maximum length of what stands before the arguments."""


class DeepSeek(Tagged):
    """Calls of V3 and R1 (`function`, separator, name, fenced JSON) and of V3.1 (name, separator, JSON)."""

    special_tokens = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR, *Tagged.reasoning_marks)

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return CALLS in templates.chat

    def call_format(self) -> CallFormat:
        if f"{FENCE}json" in self.templates.chat:  # V3 and R1
            return CallFormat(
                mark=CALLS,
                opening=CALLS,
                begin=lambda name: f"{CALL}function{SEPARATOR}{name}\n{FENCE}json\n",
                end=f"\n{FENCE}{CALL_END}",
                separator="\n",
                closing=CALLS_END,
            )
        return CallFormat(
            mark=CALLS,
            opening=CALLS,
            begin=lambda name: f"{CALL}{name}{SEPARATOR}",
            end=CALL_END,
            closing=CALLS_END,
        )

    def parsing(self, marks: Marks | None, begun: bool, tools: frozenset[str]) -> Parsing:
        return _DeepSeekParsing(marks, begun, tools)

    def template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of calls become text: DeepSeek's templates append them as they are."""
        if "tool_calls" not in message:
            return message
        return {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return {**call, "function": {**function, "arguments": text}}


class _DeepSeekParsing(TaggedParsing):
    """One output in this format."""

    call_mark = CALLS
    closing_mark = CALLS_END

    def read_calls(self) -> Steps[Found]:
        found = last = yield from self._one()
        while last is Found.CALL:
            at = yield from self.source.skip_space()
            if not (yield from self.source.starts_with(CALL, at)):
                break
            last = yield from self._one()
            if last is Found.NOTHING:
                yield Malformed("one of several tool calls cannot be read; the text is left as it is")
        return found

    def _one(self) -> Steps[Found]:
        """Read one call and its marks."""
        at = yield from self.source.skip_space()
        if not (yield from self.source.starts_with(CALL, at)):
            return Found.NOTHING
        start = at + len(CALL)
        found = yield from self.source.find((SEPARATOR,), start + NAME_CHARS)
        if found is None:
            return Found.NOTHING
        before = self.source.unread[start : found[0]].strip()
        at = yield from self.source.skip_space(found[0] + len(SEPARATOR))
        first = yield from self.source.character(at)
        fenced = first not in ("{", "") and (yield from self.source.starts_with_one(ENDS, at)) is None
        if fenced:
            opening = yield from self.source.find((FENCE,), at + NAME_CHARS)
            if opening is None:
                return Found.NOTHING
            before = self.source.unread[at : opening[0]].strip()
            at = opening[0] + len(FENCE)
            if (yield from self.source.starts_with("json", at)):
                at += len("json")
        if not before:
            return Found.NOTHING
        ends = (FENCE, *ENDS) if fenced else ENDS
        result = yield from read_arguments(self.source, CallBegin(before), at, ends)
        if result is Found.CALL:
            for mark in (FENCE, CALL_END) if fenced else (CALL_END,):
                at = yield from self.source.skip_space()
                if (yield from self.source.starts_with(mark, at)):
                    self.source.take(at + len(mark))
        return result
