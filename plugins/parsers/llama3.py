"""Llama 3.1 to 3.3: an output that is {"name": ..., "parameters": {...}} calls a tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.grammars import Grammar
from engine.core.parsers import (
    CallFormat,
    Format,
    Found,
    Malformed,
    OutputRules,
    Parser,
    Parsing,
    Steps,
    Templates,
    answer_format,
    any_text,
    const_string,
    either,
    json_string,
    optional,
    read_call,
    regex,
    sequence,
    structural_tag,
    tool_names,
)
from engine.plugins.parsers.tagged import TaggedParsing

PYTHON_TAG = "<|python_tag|>"
SEPARATOR = ";"
"""Between two calls."""
SPACES = "".join(one if one >= " " else f"\\x{ord(one):02x}" for one in map(chr, range(0x3001)) if one.isspace())
"""White space that may precede JSON, for use within the brackets of a regular expression."""
NO_CALL = f"[ \\t\\r\\n]*([^{SPACES}{{<]|<[^|])"
"""The beginning of a text in which a call can follow only after PYTHON_TAG, as a regular expression."""


class Llama3(Parser[None]):
    """Calls without marks: JSON is a call only if it has the name of a tool, else it is content."""

    api = "1"
    special_tokens = (PYTHON_TAG,)
    describes_format = True

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return "<|start_header_id|>" in templates.chat and '"parameters"' in templates.chat

    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Parsing | None:
        names = tool_names(tools)
        return _Llama3Parsing(None, False, names) if names else None

    def grammar(self, rules: OutputRules) -> Grammar | None:
        if not rules.restricts_calls and (rules.content is None or not rules.callable_tools):
            return rules.content
        calls = _Calls(
            mark=PYTHON_TAG,
            begin=lambda name: f'{{"name": "{json_string(name)}", "parameters": ',
            end="}",
            separator=f"{SEPARATOR} ",
        )
        return structural_tag(answer_format(rules, calls))


class _Calls(CallFormat):
    """Calls without a mark."""

    def free(self, rules: OutputRules) -> Format:
        """Calls, or a text. What begins with a brace is a call: where calls are restricted, no answer is JSON."""
        calls = sequence(optional(const_string(PYTHON_TAG)), self.calls(rules))
        text = sequence(regex(NO_CALL), any_text([PYTHON_TAG]))
        return either(calls, text, regex(r"[ \t\r\n]*"))


class _Llama3Parsing(TaggedParsing):
    """One output in this format."""

    call_mark = PYTHON_TAG

    def read_beginning(self) -> Steps[None]:
        at = yield from self.source.skip_space()
        if (yield from self.source.character(at)) == "{":
            yield from self.read_calls()

    def read_calls(self) -> Steps[Found]:
        found = yield from read_call(self.source, self.tools.__contains__)
        last = found
        while last is Found.CALL:
            at = yield from self.source.skip_space()
            if (yield from self.source.character(at)) != SEPARATOR:
                last = yield from read_call(self.source, self.tools.__contains__)
                continue
            after = yield from self.source.skip_space(at + 1)
            if not (yield from self.source.character(after)):
                self.source.take(after)
                break
            last = yield from read_call(self.source, self.tools.__contains__, after)
            if last is Found.NOTHING:
                yield Malformed("one of several tool calls cannot be read; the text is left as it is")
        return found
