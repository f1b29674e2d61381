"""Conformance suite for output parsers: no cut of the text makes a difference, nothing is lost, calls are whole."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from attrs import define, field

from engine.core.parsers import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Malformed,
    Parser,
    Reasoning,
    Templates,
)


@define
class Call:
    """A tool call of an answer."""

    name: str
    arguments: str = ""
    id: str = ""
    complete: bool = False


@define
class Answer:
    """What an output says."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(factory=list)
    malformed: list[str] = field(factory=list)

    @classmethod
    def of(cls, events: Sequence[Event]) -> Answer:
        """Join events. Fails where they make no sense together."""
        answer = cls()
        for event in events:
            match event:
                case Content():
                    answer.content += event.text
                case Reasoning():
                    answer.reasoning += event.text
                case CallBegin():
                    answer.calls.append(Call(event.name, id=event.id))
                case CallArguments():
                    assert answer.calls, "arguments come before a call"
                    assert not answer.calls[-1].complete, "arguments come after the end of their call"
                    answer.calls[-1].arguments += event.text
                case CallEnd():
                    assert answer.calls, "a call ends before it begins"
                    assert not answer.calls[-1].complete, "a call ends twice"
                    answer.calls[-1].complete = True
                case Malformed():
                    answer.malformed.append(event.reason)
        return answer


def joined(events: Sequence[Event]) -> list[Event]:
    """Events with the texts of neighbours of one class joined."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content | Reasoning | CallArguments) and type(event) is type(last):
            found[-1] = type(event)(last.text + event.text)
        else:
            found.append(event)
    return found


@define
class Example:
    """An output and what it says."""

    text: str
    """As the model writes it, without the token that ends it."""
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    """(name, arguments) of each call, the arguments as JSON or as the object."""
    malformed: bool = False
    """Whether the text breaks the format."""
    prompt: str = ""
    """The end of the prompt, if it matters."""
    tools: tuple[str, ...] = ("f", "g")
    """Names of the tools that the model may call."""


class ParserConformance:
    """Derive a class named Test... from this class and set `parser` and `examples`."""

    parser: ClassVar[type[Parser[Any]]]
    options: ClassVar[Any] = None
    """Options passed to the parser; None: the defaults of its options_class."""
    templates: ClassVar[Templates] = Templates()
    """The templates of a model that writes this format."""
    examples: ClassVar[tuple[Example, ...]]

    def make(self) -> Parser[Any]:
        """A fresh parser."""
        options = self.options
        if options is None and self.parser.options_class is not None:
            options = self.parser.options_class()
        return self.parser(options, self.templates)

    def parse(self, example: Example, text: str, cuts: Sequence[int] = ()) -> list[Event]:
        """The events of a text that comes in pieces, the texts of neighbours joined."""
        tools = [{"type": "function", "function": {"name": name}} for name in example.tools]
        parsing = self.make().begin(example.prompt, tools)
        if parsing is None:
            return [Content(text)] if text else []
        events: list[Event] = []
        for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
            new = parsing.feed(text[begin:end])
            events += new
            if begin + 1 == end and new and isinstance(new[-1], Reasoning):
                assert parsing.reasoning, "the last text was reasoning, but `reasoning` is False"
        events += parsing.end()
        assert not any(isinstance(event, Content | Reasoning) and not event.text for event in events), (
            "the parser returned Content or Reasoning with an empty text"
        )
        return joined(events)

    def test_the_templates_are_recognized(self) -> None:
        """recognizes() accepts the templates of a model that writes the format, and refuses() does not refuse them."""
        assert self.parser.recognizes(self.templates) is True
        assert self.parser.refuses(self.templates) is None

    def test_examples(self) -> None:
        """Each example says what its author means."""
        for example in self.examples:
            answer = Answer.of(self.parse(example, example.text))
            assert (answer.content, answer.reasoning) == (example.content, example.reasoning), (
                f"content or reasoning of {example.text!r}"
            )
            assert [call.name for call in answer.calls] == [name for name, _ in example.calls], (
                f"calls of {example.text!r}"
            )
            for call, (_, wanted) in zip(answer.calls, example.calls, strict=True):
                found = call.arguments if isinstance(wanted, str) else json.loads(call.arguments)
                assert found == wanted, f"arguments of {call.name} in {example.text!r}"
            assert bool(answer.malformed) is example.malformed, f"malformed: {answer.malformed} of {example.text!r}"

    def test_cuts_make_no_difference(self) -> None:
        """A text in any pieces gives the events of the whole text: examples, and examples that are cut short."""
        for example, text in self.texts():
            whole = self.parse(example, text)
            assert self.parse(example, text, range(1, len(text))) == whole, f"by the character: {text!r}"
            pick = random.Random(len(text))
            for _ in range(4):
                cuts = sorted(pick.choices(range(len(text) + 1), k=pick.randint(1, 6)))
                assert self.parse(example, text, cuts) == whole, f"cut at {cuts}: {text!r}"

    def test_complete_calls_have_an_object_as_arguments(self) -> None:
        """The arguments of a call that has ended are a JSON object."""
        for example, text in self.texts():
            for call in Answer.of(self.parse(example, text)).calls:
                assert call.name, f"a call without a name: {text!r}"
                if call.complete:
                    assert isinstance(json.loads(call.arguments), dict), f"not an object: {text!r}"

    def test_nothing_is_lost(self) -> None:
        """Every word of a text is somewhere in the answer."""
        for example, text in self.texts():
            answer = Answer.of(self.parse(example, text))
            parts = [answer.content, answer.reasoning, *(call.name + call.arguments + call.id for call in answer.calls)]
            for word in ("weather", "Rome", "sunny", "hmm"):
                assert sum(part.count(word) for part in parts) >= min(1, text.count(word)), f"{word} is lost: {text!r}"

    def texts(self) -> Iterator[tuple[Example, str]]:
        """The examples, and what is left of each if the output ends early or a piece is missing."""
        pick = random.Random(0)
        for example in self.examples:
            text = example.text
            yield example, text
            for end in pick.sample(range(len(text)), k=min(6, len(text))):
                yield example, text[:end]
            for _ in range(4):
                begin, end = sorted(pick.choices(range(len(text) + 1), k=2))
                yield example, text[:begin] + text[end:]

    @pytest.mark.parametrize("role", ["user", "assistant", "tool"])
    def test_template_message_keeps_other_messages(self, role: str) -> None:
        """template_message() changes neither its argument nor a message without calls and reasoning."""
        message: Mapping[str, Any] = {"role": role, "content": "sunny"}
        assert dict(self.make().template_message(message)) == message
        call = {"id": "c12345678", "type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
        past = {"role": "assistant", "content": "", "reasoning_content": "hmm", "tool_calls": [call]}
        before = json.dumps(past)
        changed = json.dumps(dict(self.make().template_message(past)), ensure_ascii=False)
        assert json.dumps(past) == before, "template_message() changed its argument"
        assert all(word in changed for word in ("hmm", "Rome", '"f"')), "template_message() loses a part"

    def test_call_ids_differ(self) -> None:
        """new_call_id() returns another id each time."""
        parser = self.make()
        assert len({parser.new_call_id() for _ in range(50)}) == 50
