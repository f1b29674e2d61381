"""Contract of plugins/parsers/: what the text of an output is: reasoning, content or tool calls."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from attrs import frozen

from engine.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from engine.core.grammars import Grammar

API = "1"
"""Version of this contract."""

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
    """A sentence for the API's client."""
    at_end: bool = False
    """Whether the open call is incomplete only because the output ended."""


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd | Malformed


@frozen(kw_only=True)
class Templates:
    """The templates by which a checkpoint describes its format."""

    chat: str = ""
    """Source of the chat template, the one for tools if there are several; empty if there is none."""
    response: Mapping[str, Any] | None = None
    """transformers' response template, if the tokenizer has one."""


@frozen
class ToolChoice:
    """Which of the offered tools an output may call, and whether it must."""

    mode: Literal["auto", "none", "required"] = "auto"
    """auto: the model decides. none: it calls none. required: it calls at least one, and there is no content."""
    name: str | None = None
    """With required: the function that it must call, once; None: any."""
    allowed: frozenset[str] | None = None
    """The functions that it may call; None: all."""

    @property
    def forced(self) -> bool:
        """Whether the output must call a tool."""
        return self.mode == "required"

    def allows(self, name: str) -> bool:
        """Whether the function of this name may be called."""
        return (
            self.mode in ("auto", "required")
            and self.name in (None, name)
            and (self.allowed is None or name in self.allowed)
        )


@frozen(kw_only=True)
class OutputRules:
    """The restrictions on an output, from which a parser makes the grammar of its format."""

    prompt: str
    """The rendered conversation, whose end may be the beginning of the answer."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The offered tools, as in OpenAI's API."""
    strict: frozenset[str] = frozenset()
    """Names of the tools whose arguments must match their schemas."""
    choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    """Whether an output may have several calls."""
    content: Grammar | None = None
    """What the content must match; None: it is free."""

    @property
    def callable_tools(self) -> list[Mapping[str, Any]]:
        """The tools that may be called, in the order in which they are offered."""
        return [tool for tool in self.tools if self.choice.allows(tool["function"]["name"])]

    @property
    def several_calls(self) -> bool:
        """Whether there may be more than one call. A named tool is called once."""
        return self.parallel_calls and self.choice.name is None

    @property
    def restricts_calls(self) -> bool:
        """Whether calls are restricted more than by the model's own decision."""
        callable_tools = self.callable_tools
        return bool(callable_tools) and (
            self.choice.forced
            or len(callable_tools) < len(self.tools)
            or bool(self.strict & tool_names(callable_tools))
        )


class Parsing(ABC):
    """One output that is being parsed.

    How the text is cut into pieces makes no difference: the events of `feed` and `end`, with the texts of adjacent
    events of one class joined, depend on the whole text alone. An event comes as soon as no further text can change it.
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

    def end_by_model(self) -> Sequence[Event]:
        """The remaining events when the model ended the output, rather than a limit or a stop string.

        By default, those of `end`.
        """
        return self.end()


class Parser(ABC, Generic[OptionsT]):
    """Knows the format in which a family of models writes reasoning and tool calls.

    OptionsT: the parser's own settings, an object of `options_class`; None for a parser without any. A server makes one
    parser when it starts; several threads at a time call `grammar` and `template_message`.
    """

    api: ClassVar[str]
    """Version of the contract that the class was written for."""
    options_class: ClassVar[type | None] = None
    """Frozen attrs class of the plugin's own settings ([parser.options]); None: no settings."""
    reads_calls: ClassVar[bool] = True
    """Whether it reads tool calls; if not, the server refuses tools."""
    special_tokens: ClassVar[tuple[str, ...] | None] = ()
    """Texts of the special tokens that must stay in the text, because the format needs them; None: all of them. Others
    are left out, as the request asks."""
    describes_format: ClassVar[bool] = False
    """Whether `grammar` describes the format. If not, the server refuses requests that force or restrict calls, and an
    output that must match a grammar is not parsed: all of it is content."""

    @classmethod
    def refuses(cls, templates: Templates) -> str | None:
        """A sentence that says why this parser cannot be used here and what would work; None if it can."""
        return None

    @classmethod
    @abstractmethod
    def recognizes(cls, templates: Templates) -> bool:
        """Whether the model, by its templates, writes this format; `auto` takes only a parser that recognizes it."""

    def __init__(self, options: OptionsT, templates: Templates) -> None:
        """Keep both. options: an instance of `options_class`, None without one."""
        self.options = options
        self.templates = templates

    @abstractmethod
    def begin(self, prompt: str, tools: Sequence[Mapping[str, Any]]) -> Parsing | None:
        """Start to parse an output; None if all of its text is content.

        prompt: the rendered conversation, whose end may be the beginning of the answer. tools: those that the model may
        call, as in OpenAI's API; without any, nothing is a call.
        """

    def grammar(self, rules: OutputRules) -> Grammar | None:
        """The grammar of an output that follows some rules, reasoning included; None: nothing is restricted.

        `begin` reads every text that matches without Malformed: as calls of tools that may be called, with arguments
        that the rules allow, and content that matches `rules.content`. Called if `describes_format`. Raises
        InvalidRequestError for rules that the format cannot express.
        """
        raise InvalidRequestError(f"the parser {type(self).__name__} does not describe its format", "tool_choice")

    def template_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """An earlier message as the format's chat templates expect it; by default unchanged.

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
