"""Contract of plugins/parsers/: what the text of an output is: reasoning, content or tool calls."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from attrs import frozen

API = "1"

OptionsT = TypeVar("OptionsT")


@frozen
class Reasoning:
    """More text of the model's reasoning."""

    text: str


@frozen
class Content:
    """More text of the answer. Text that the parser cannot read is content too."""

    text: str


@frozen
class CallBegin:
    """A tool call begins; its arguments follow. It ends with CallEnd, or is cut short by Malformed or the end."""

    name: str
    id: str = ""
    """As the model wrote it; empty if the format has none."""


@frozen
class CallArguments:
    """More text of the arguments of the tool call that began last, as JSON."""

    text: str


@frozen
class CallEnd:
    """The tool call that began last is complete: its arguments are a JSON object."""


@frozen
class Malformed:
    """What follows, or the call that began last, breaks the format. The text is not lost: it is content."""

    reason: str
    """A sentence for whoever called the API."""


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd | Malformed


@frozen(kw_only=True)
class Templates:
    """What a checkpoint says of its format."""

    chat: str = ""
    """Source of the chat template, the one for tools if there are several; empty if there is none."""
    response: Mapping[str, Any] | None = None
    """transformers' response template, if the tokenizer has one."""


class Parsing(ABC):
    """One output that is being parsed.

    The pieces in which the text comes make no difference: the events of `feed` and `end`, with the texts of neighbours
    of one class joined, depend on the whole text alone. An event comes as soon as no further text can change it.
    """

    @property
    @abstractmethod
    def reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""

    @abstractmethod
    def feed(self, text: str) -> Sequence[Event]:
        """The events that more text completes."""

    @abstractmethod
    def end(self) -> Sequence[Event]:
        """The remaining events, after the last text."""


class Parser(ABC, Generic[OptionsT]):
    """Knows the format in which a family of models writes reasoning and tool calls.

    OptionsT: the parser's own settings, an object of `options_class`; None for a parser without any. A server makes one
    parser when it starts and uses it from one thread.
    """

    api: ClassVar[str]
    options_class: ClassVar[type | None] = None
    reads_calls: ClassVar[bool] = True
    """Whether it reads tool calls; if not, the server refuses tools."""
    special_tokens: ClassVar[tuple[str, ...] | None] = ()
    """Texts of the special tokens that must stay in the text, because the format needs them; None: all of them. Others
    are left out, as the request asks."""

    @classmethod
    def refuses(cls, templates: Templates) -> str | None:
        """A sentence that says why this parser cannot be used here and what would work; None if it can."""
        return None

    @classmethod
    @abstractmethod
    def recognizes(cls, templates: Templates) -> bool:
        """Whether the model writes this format, by its templates: `auto` takes only such a parser."""

    def __init__(self, options: OptionsT, templates: Templates) -> None:
        self.options = options
        self.templates = templates

    @abstractmethod
    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Parsing | None:
        """Start to parse an output; None if all of its text is content.

        prompt: the rendered conversation, whose end may be the beginning of the answer. tools: those that the model may
        call, as in OpenAI's API; without any, nothing is a call.
        """

    def template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """An earlier message as the format's chat templates expect it; as OpenAI's API has it by default.

        message: `content` is a text, `reasoning_content` is absent or a text, and the arguments of each of
        `tool_calls` are an object, or a text if they are no JSON object.
        """
        return message

    def new_call_id(self) -> str:
        """An id for a call to which the model has given none."""
        return f"call_{uuid.uuid4().hex}"


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names of the functions among `tools`, as OpenAI's API has them."""
    return frozenset(tool["function"]["name"] for tool in tools)
