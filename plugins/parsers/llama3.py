"""Llama 3.1 to 3.3: an output that is {"name": ..., "parameters": {...}} calls a tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.parsers import Found, Parser, Parsing, Steps, Templates, read_call, tool_names
from engine.plugins.parsers.tagged import TaggedParsing

PYTHON_TAG = "<|python_tag|>"
SEPARATOR = ";"
"""Between two calls."""


class Llama3(Parser[None]):
    """Calls without marks: JSON is a call only if it has the name of a tool, else it is content."""

    api = "1"
    special_tokens = (PYTHON_TAG,)

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return "<|start_header_id|>" in templates.chat and '"parameters"' in templates.chat

    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Parsing | None:
        names = tool_names(tools)
        return _Llama3Parsing(None, False, names) if names else None


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
            if (yield from self.source.character(at)) == SEPARATOR:
                self.source.take(at + 1)
            last = yield from read_call(self.source, self.tools.__contains__)
        return found
