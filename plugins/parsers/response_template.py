"""Formats that a tokenizer describes itself, by a response template, which transformers' ResponseParser reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import evolve

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar
from engine.core.parsers import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallFormat,
    Content,
    Event,
    Format,
    Malformed,
    OutputRules,
    Parser,
    Parsing,
    Reasoning,
    Templates,
    answer_format,
    any_text,
    json_string,
    optional,
    sequence,
    structural_tag,
    tag,
)

CONTENT, CALLS = "content", "tool_calls"
REASONING = ("thinking", "reasoning_content", "reasoning")
KNOWN = (CONTENT, CALLS, *REASONING)
"""Fields of a message for which the API has a place."""
CALL_AS_IS = {"type": "function", "function": "{content}"}
"""Transformation of a call that is {"name": ..., "arguments": ...} in the text."""
PROMPT_CHARS = 2**16
"""Characters of the end of the prompt in which the beginning of the answer is looked for."""


class ResponseTemplate(Parser[None]):
    """What the tokenizer's response template says. A call comes whole, when its end is read."""

    api = "1"
    special_tokens = None
    describes_format = True

    def __init__(self, options: None, templates: Templates) -> None:
        super().__init__(options, templates)
        self._template = _load(templates)

    @classmethod
    def refuses(cls, templates: Templates) -> str | None:
        if templates.response is None:
            return "the tokenizer has no response template; name the parser of the model's format"
        try:
            _load(templates)
        except Exception as error:  # of whatever types, for what is no response template
            return f"the tokenizer's response template is wrong: {error}"
        fields = templates.response["fields"]
        unknown = sorted(set(fields) - set(KNOWN))
        if unknown:
            return f"the tokenizer's response template has the field {unknown[0]!r}, for which the API has no place"
        if all("open" in one or "open_pattern" in one for one in fields.values()):
            return "the tokenizer's response template drops text that is in none of its fields; name another parser"
        return None

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return templates.response is not None

    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> _TemplateParsing:
        return _TemplateParsing(self._template, prompt[-PROMPT_CHARS:], [dict(tool) for tool in tools])

    def grammar(self, rules: OutputRules) -> Grammar | None:
        """Refuses templates whose marks are expressions, or whose calls are not {"name": ..., "arguments": ...}."""
        if not rules.restricts_calls and rules.content is None:
            return None
        calls = self._call_format() if rules.callable_tools else None
        if calls is not None and not self._template.fields[CALLS].repeats:
            rules = evolve(rules, parallel_calls=False)
        content = self._template.fields.get(CONTENT)
        if content is None or content.open_re is not None or content.content != "text" or content.transform:
            raise _not_described("what it says of content")
        reasoning = self._reasoning_format(rules, calls)
        if reasoning is None and not rules.callable_tools:
            return rules.content
        return structural_tag(sequence(reasoning, answer_format(rules, calls)))

    def _call_format(self) -> CallFormat:
        field = self._template.fields.get(CALLS)
        plain = field is not None and field.content == "json" and field.transform == CALL_AS_IS
        if not plain or not field.open_literals or not field.close_literals:
            raise _not_described("what it says of tool calls")
        mark: str = field.open_literals[0]
        return CallFormat(
            mark=mark,
            begin=lambda name: f'{mark}{{"name": "{json_string(name)}", "arguments": ',
            end=f"}}{field.close_literals[0]}",
        )

    def _reasoning_format(self, rules: OutputRules, calls: CallFormat | None) -> Format | None:
        """The reasoning with which the output may begin, or goes on; None if there is none, or the prompt closes it."""
        named = [self._template.fields[name] for name in REASONING if name in self._template.fields]
        if not named:
            return None
        [field, *others] = named
        if others or not field.open_literals or not field.close_literals or field.content != "text":
            raise _not_described("what it says of reasoning")
        parsing = self.begin(rules.prompt, rules.tools)
        if parsing.closed:
            return None
        close = field.close_literals[0]
        text = any_text([close, calls.mark] if calls is not None else [close])
        reasoning = tag("" if parsing.reasoning else field.open_literals[0], text, field.close_literals[0])
        return reasoning if parsing.reasoning else optional(reasoning)


def _not_described(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the tokenizer's response template cannot be made a grammar ({what}); leave out what needs one, or start the "
        "server with --parser, if the model writes one of its formats",
        "tool_choice",
    )


def _load(templates: Templates) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(dict(templates.response or {}))


class _TemplateParsing(Parsing):
    """One output in a format of a response template.

    transformers' parser is fed by the character: what it reads before it raises depends on how the text is cut.
    """

    def __init__(self, template: Any, prompt: str, tools: list[Any]) -> None:
        self._template = template
        self._tools = tools
        self._field = ""
        """The field that is open."""
        self._unread = ""
        """Text that is part of no event so far: the beginning of a mark."""
        self._call: list[str] = []
        """The whole text of the call that is open."""
        self._space: list[str] = []
        """White space that is dropped if its field ends."""
        self._first = True
        """Whether the open field has no text so far."""
        self.closed = False
        """Whether reasoning ended in the prompt."""
        self._begin(prompt)

    @property
    def reasoning(self) -> bool:
        return self._field in REASONING

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            self._unread += character
            events += self._read(character)
        return events

    def end(self) -> list[Event]:
        return self._read(None)

    def _begin(self, prompt: str) -> None:
        """Start to read after a prompt."""
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(self._template, prefix=prompt, tools=self._tools)
        self._field = ""
        for event in self._parser.initial_events:
            if event["type"] == "region_open":
                self._field, self._first, self._space = event["field"], True, []
            elif event["type"] == "region_close":
                self.closed = self.closed or self._field in REASONING
                self._field = ""

    def _read(self, character: str | None) -> list[Event]:
        """The events of one more character; None: of the end."""
        try:
            found = self._parser.feed(character) if character is not None else self._parser.finalize()[1]
        except Exception:  # of a content parser or of a transformation that the template names
            text = "".join((*self._call, self._unread))
            self._call, self._unread = [], ""
            self._begin("")
            return [Malformed("a part of the output is not as the response template says"), *_texts(Content, text)]
        events: list[Event] = []
        for event in found:
            events += self._event(event)
        return events

    def _event(self, event: Mapping[str, Any]) -> list[Event]:
        """What an event of transformers' parser says."""
        kind = event["type"]
        if kind == "region_open":
            self._field, self._first, self._space = event["field"], True, []
            implicit = self._template.fields[self._field].open_re is None
            if not implicit:
                self._call, self._unread = [self._unread] if self._field == CALLS else [], ""
            return []
        if kind == "region_chunk":
            return self._chunk(event["text"])
        field, self._field = event["field"], ""
        if field != CALLS:
            self._unread = ""
            return []
        text, self._call, self._unread = "".join((*self._call, self._unread)), [], ""
        return self._calls(event["value"], text)

    def _chunk(self, text: str) -> list[Event]:
        """Text of the open field: without white space around it, as transformers has it."""
        self._unread = self._unread[len(text) :]
        if self._field == CALLS:
            self._call.append(text)
            return []
        text = text.lstrip() if self._first else text
        kept = text.rstrip()
        if kept:
            self._space, self._first, kept, text = [], False, "".join((*self._space, kept)), text[len(kept) :]
        if text:
            self._space.append(text)
        return _texts(Reasoning if self._field in REASONING else Content, kept)

    def _calls(self, value: Any, text: str) -> list[Event]:
        """The calls of a value; its text as content if it has none, or there are no tools."""
        if not self._tools:
            return _texts(Content, text)
        events: list[Event] = []
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function") if isinstance(one, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if not isinstance(name, str) or not name or not isinstance(arguments, dict):
                return [Malformed("a tool call has no name or no arguments"), *_texts(Content, text)]
            call_id = one.get("id")
            events.append(CallBegin(name, call_id if isinstance(call_id, str) else ""))
            events += [CallArguments(msgspec.json.encode(arguments).decode()), CallEnd()]
        return events


def _texts(kind: type[Content | Reasoning], text: str) -> list[Event]:
    return [kind(text)] if text else []
