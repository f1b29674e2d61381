"""Builds the grammar of a format of reasoning, content and tool calls, as a structural tag.

A text in a structural tag may hold the names of special tokens, which stand for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from attrs import frozen

from engine.core.grammars import Grammar, format_of
from engine.core.parsers.base import OutputRules
from engine.core.parsers.tool_schemas import arguments_schema

Format = dict[str, Any]
"""A part of a structural tag."""


def const_string(value: str) -> Format:
    """A text."""
    return {"type": "const_string", "value": value}


def any_text(excludes: Sequence[str] = ()) -> Format:
    """Any text that contains none of `excludes`."""
    return {"type": "any_text", "excludes": list(excludes)}


def regex(pattern: str) -> Format:
    """A text that a regular expression matches as a whole."""
    return {"type": "regex", "pattern": pattern}


def sequence(*elements: Format | None) -> Format:
    """Formats one after the other; None is left out."""
    present = [one for one in elements if one is not None]
    return present[0] if len(present) == 1 else {"type": "sequence", "elements": present}


def either(*elements: Format | None) -> Format:
    """One of several formats; None is left out."""
    present = [one for one in elements if one is not None]
    return present[0] if len(present) == 1 else {"type": "or", "elements": present}


def optional(content: Format) -> Format:
    """A format, or nothing."""
    return {"type": "optional", "content": content}


def star(content: Format) -> Format:
    """A format any number of times."""
    return {"type": "star", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    """A format between two marks."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def structural_tag(made: Format) -> Grammar:
    """The grammar of a format."""
    return Grammar.structural_tag(made)


def content_format(rules: OutputRules) -> Format | None:
    """The format of the content; None if it is free."""
    return None if rules.content is None else format_of(rules.content)


def json_string(value: str) -> str:
    """A text as it stands between quotes in JSON."""
    return msgspec.json.encode(value).decode()[1:-1]


@frozen(kw_only=True)
class CallFormat:
    """How a family of models writes calls, in a format that begins them with a mark.

    Several calls are `opening`, the calls with `separator` between them, `closing`; a call is `begin` of its name, the
    arguments, `end`.
    """

    mark: str
    """Text that occurs in calls only: the beginning of `opening`, or of every call if `opening` is empty."""
    begin: Callable[[str], str]
    """What stands before the arguments of a call of a tool with this name."""
    end: str = ""
    separator: str = ""
    opening: str = ""
    closing: str = ""

    def calls(self, rules: OutputRules) -> Format:
        """At least one call, and nothing else."""
        tags: Format = {
            "type": "tags_with_separator",
            "tags": self._tags(rules),
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not rules.several_calls,
        }
        return tag(self.opening, tags, self.closing) if self.opening or self.closing else tags

    def free(self, rules: OutputRules) -> Format:
        """Free text in which calls may stand. Only for a format with a mark."""
        tags = [self.calls(rules)] if self.opening else self._tags(rules)
        return {
            "type": "triggered_tags",
            "triggers": [self.mark],
            "tags": tags,
            "stop_after_first": not rules.several_calls,
        }

    def _tags(self, rules: OutputRules) -> list[Format]:
        return [
            tag(self.begin(tool["function"]["name"]), call_arguments(rules, tool), self.end)
            for tool in rules.callable_tools
        ]


def call_arguments(rules: OutputRules, tool: Any) -> Format:
    """The arguments of a tool: by its schema if the tool is strict or a call is forced, else any object."""
    name = tool["function"]["name"]
    schema = arguments_schema(tool, strict=name in rules.strict, exact=rules.choice.forced)
    return {"type": "json_schema", "json_schema": schema}


def answer_format(rules: OutputRules, calls: CallFormat | None) -> Format:
    """What may follow the reasoning: calls, content that matches a grammar, either, or free text with calls in it.

    For rules that restrict calls or content. calls: None for a format without any.
    """
    content = content_format(rules)
    if calls is None or not rules.callable_tools:
        assert content is not None
        return content
    if rules.choice.forced:
        return calls.calls(rules)
    return calls.free(rules) if content is None else either(content, calls.calls(rules))
