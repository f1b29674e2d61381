"""Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from engine.core.parsers import CallFormat, Found, Parsing, Steps, Templates, json_string, read_call
from engine.plugins.parsers.tagged import Marks, Tagged, TaggedParsing

MARK, CLOSING_MARK = "<tool_call>", "</tool_call>"
OTHER_FORMATS = ("<function=", "<arg_key>")
"""Texts in the templates of models that write anything but JSON between the same marks (Qwen3-Coder, GLM)."""


class Hermes(Tagged):
    """Calls as JSON between marks, each in marks of its own."""

    special_tokens = (MARK, CLOSING_MARK, *Tagged.reasoning_marks)

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return MARK in templates.chat and not any(other in templates.chat for other in OTHER_FORMATS)

    def call_format(self) -> CallFormat:
        return CallFormat(
            mark=MARK,
            begin=lambda name: f'{MARK}\n{{"name": "{json_string(name)}", "arguments": ',
            end=f"}}\n{CLOSING_MARK}",
            separator="\n",
        )

    def parsing(self, marks: Marks | None, begun: bool, tools: frozenset[str]) -> Parsing:
        return _HermesParsing(marks, begun, tools)


class _HermesParsing(TaggedParsing):
    """One output in this format."""

    call_mark = MARK
    closing_mark = CLOSING_MARK

    def read_calls(self) -> Steps[Found]:
        found = yield from read_call(self.source, bool)
        while found is Found.CALL:  # some models write several calls between two marks
            if (yield from read_call(self.source, bool)) is Found.NOTHING:
                break
        return found
