"""Formats that mark reasoning and tool calls within a text, as <think>...</think>."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attrs import frozen

from engine.core.grammars import Grammar
from engine.core.parsers import (
    CallFormat,
    Content,
    Event,
    Format,
    Found,
    Malformed,
    OutputRules,
    Parser,
    Parsing,
    Reasoning,
    SequentialParsing,
    Steps,
    Templates,
    answer_format,
    any_text,
    optional,
    regex,
    sequence,
    structural_tag,
    tag,
    tool_names,
)

NOT_A_CALL = "the output has the mark of a tool call, but no call that can be read; the text is left as it is"

SPACE_AFTER_REASONING = r"\n{0,2}"
"""Line breaks between the mark that ends reasoning and what follows."""
END_CHARS = 256
"""Characters of the end of a prompt that may be the beginning of the answer."""

Marks = tuple[str, str]
"""What begins and what ends a part of the text."""


@frozen(kw_only=True)
class ReasoningOptions:
    """Settings of the parsers of marked formats."""

    reasoning: bool | None = None
    """Whether the output may begin with reasoning; None: if the chat template has its marks."""


class Tagged(Parser[ReasoningOptions]):
    """What parsers of marked formats have in common."""

    api = "1"
    options_class = ReasoningOptions
    describes_format = True
    reasoning_marks: ClassVar[Marks] = ("<think>", "</think>")

    def __init__(self, options: ReasoningOptions, templates: Templates) -> None:
        super().__init__(options, templates)
        given = options.reasoning
        self._reasons = self.reasoning_marks[1] in templates.chat if given is None else given

    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Parsing | None:
        names = tool_names(tools)
        if not (names or self._reasons):
            return None
        marks = self.reasoning_marks if self._reasons else None
        return self.parsing(marks, prompt[-END_CHARS:].rstrip().endswith(self.reasoning_marks[0]), names)

    def call_format(self) -> CallFormat | None:
        """How the model writes calls; None for a format without any."""
        return None

    def grammar(self, rules: OutputRules) -> Grammar | None:
        if not rules.restricts_calls and rules.content is None:
            return None
        calls = self.call_format()
        reasoning = self._reasoning_format(rules, calls)
        if reasoning is None and not rules.callable_tools:
            return rules.content
        return structural_tag(sequence(reasoning, answer_format(rules, calls)))

    def _reasoning_format(self, rules: OutputRules, calls: CallFormat | None) -> Format | None:
        """The reasoning with which the output may begin, or goes on; None if it is off, or closed in the prompt.

        A call within it would be read as one, so its mark may not come before the reasoning ends.
        """
        begin, end = self.reasoning_marks
        prompt = rules.prompt[-END_CHARS:].rstrip()
        if not self._reasons or prompt.endswith(end):
            return None
        begun = prompt.endswith(begin)
        text = any_text([end, calls.mark] if calls is not None and rules.callable_tools else [end])
        reasoning = tag("" if begun else begin, text, end)
        with_space = sequence(reasoning, regex(SPACE_AFTER_REASONING))
        return with_space if begun else optional(with_space)

    @abstractmethod
    def parsing(self, marks: Marks | None, begun: bool, tools: frozenset[str]) -> Parsing:
        """A parsing; its arguments are those of TaggedParsing."""


class TaggedParsing(SequentialParsing):
    """Reads reasoning between marks, tool calls after a mark, and content around them.

    White space next to marks is not part of the texts: line breaks at the beginning, any at the end.
    """

    call_mark: ClassVar[str] = ""
    """Begins a tool call; empty: there are none."""
    closing_mark: ClassVar[str] = ""
    """Ends a tool call where the format has such a mark, which models forget."""

    def __init__(self, marks: Marks | None, begun: bool, tools: frozenset[str]) -> None:
        """marks: of reasoning; None: there is none. begun: whether the prompt has the first of them. tools: names."""
        super().__init__()
        self.tools = tools
        self._marks = marks
        self._reasoning = begun and marks is not None
        self._strip = self._reasoning
        """Whether line breaks that come next are dropped."""
        self._held: list[str] = []
        """White space that is dropped if a mark follows."""
        self._closing = False
        """Whether the mark that ends a call has yet to come."""

    @property
    def reasoning(self) -> bool:
        return self._reasoning

    def read_calls(self) -> Steps[Found]:
        """Read what follows `call_mark`, up to the end of the call. `Found.NOTHING`: nothing is read."""
        raise NotImplementedError  # only called if there is a call_mark
        yield

    def read(self) -> Steps[None]:
        yield from self.read_beginning()
        while (mark := (yield from self.source.text_until(self._next_marks(), self._text))) is not None:
            if self._marks is not None and mark == self._marks[1]:
                self._held, self._strip, self._reasoning = [], True, False
            elif mark == self.closing_mark:
                self._held, self._strip, self._closing = [], True, False
            else:
                yield from self._call(mark)
        yield from self._flush()

    def read_beginning(self) -> Steps[None]:
        """Read the mark of reasoning with which the output may begin, even if the prompt has it."""
        if self._marks is None:
            return
        at = yield from self.source.skip_space()
        if (yield from self.source.starts_with(self._marks[0], at)):
            self.source.take(at + len(self._marks[0]))
            self._reasoning = self._strip = True

    def _next_marks(self) -> tuple[str, ...]:
        """The marks that count where the text is now."""
        marks: tuple[str, ...] = (self.call_mark,) if self.call_mark and self.tools else ()
        if self._marks is not None and self._reasoning:
            marks += (self._marks[1],)
        if self._closing:
            marks += (self.closing_mark,)
        return marks

    def _call(self, mark: str) -> Steps[None]:
        """Read calls, or leave the mark and what follows as text."""
        found = yield from self.read_calls()
        if found is Found.NOTHING:
            if not self._reasoning:
                yield from self._flush()
                yield Malformed(NOT_A_CALL)
            yield from self._text(mark)
            return
        self._held, self._strip, self._closing = [], found is Found.CALL, bool(self.closing_mark)
        if self._closing:
            at = yield from self.source.skip_space()
            if (yield from self.source.starts_with(self.closing_mark, at)):
                self.source.take(at + len(self.closing_mark))
                self._closing = False

    def _text(self, text: str) -> list[Event]:
        """The events of text of the current part."""
        if self._strip:
            text = text.lstrip("\r\n")
            self._strip = not text
        kept = text.rstrip()
        if kept:
            self._held, kept, text = [], "".join((*self._held, kept)), text[len(kept) :]
        if text:
            self._held.append(text)  # joined only once, however many pieces come
        return self._event(kept)

    def _flush(self) -> list[Event]:
        """The events of white space after which no mark came."""
        held, self._held = "".join(self._held), []
        return self._event(held)

    def _event(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Reasoning(text) if self._reasoning else Content(text)]


class ReasoningTags(Tagged):
    """Reasoning in <think>...</think>, as of Qwen 3 and DeepSeek-R1, and no tool calls."""

    reads_calls = False
    special_tokens = Tagged.reasoning_marks

    @classmethod
    def recognizes(cls, templates: Templates) -> bool:
        return cls.reasoning_marks[1] in templates.chat

    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Parsing | None:
        return super().begin(prompt, ())

    def parsing(self, marks: Marks | None, begun: bool, tools: frozenset[str]) -> Parsing:
        return TaggedParsing(marks, begun, tools)
