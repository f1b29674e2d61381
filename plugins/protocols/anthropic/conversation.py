"""The messages of a request as chat templates expect them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from engine.core.protocols import ApiError, convert, excerpt, invalid
from engine.plugins.protocols.anthropic import signature
from engine.plugins.protocols.anthropic.blocks import ID_PREFIX
from engine.plugins.protocols.anthropic.bodies import (
    Message,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = (USER, ASSISTANT, SYSTEM)
"""Roles of messages."""
BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts before its system prompt: it is no text for the model, and has a value that
changes with each request, which would make prefixes of conversations differ."""
ERROR = "Error: "
"""Precedes the result of a tool that failed, unless it says so itself: chat templates have no other place for that."""
OF_ROLE = {"text": ROLES, "thinking": (ASSISTANT,), "redacted_thinking": (ASSISTANT,), "tool_use": (ASSISTANT,)} | {
    "tool_result": (USER,)
}
"""Type of a block -> roles of the messages that may hold it."""


@define
class _Said:
    """A message as it is collected."""

    role: str
    texts: list[str] = field(factory=list)
    """Lines of their own; empty ones are left out."""
    reasoning: list[str] = field(factory=list)
    calls: list[dict[str, Any]] = field(factory=list)
    others: Mapping[str, str] = field(factory=dict)

    def message(self) -> dict[str, Any]:
        """As chat templates expect it."""
        found: dict[str, Any] = {"role": self.role, "content": "\n".join(filter(None, self.texts)), **self.others}
        if reasoning := "\n".join(filter(None, self.reasoning)):
            found["reasoning_content"] = reasoning
        if self.calls:
            found["tool_calls"] = self.calls
        return found


class TemplateMessages:
    """Collects messages as chat templates expect them.

    Each of Anthropic's messages may become several: the results of tools are messages of their own. Neighbours of one
    role become one message, whose texts are lines of their own.
    """

    def __init__(self, *, system_anywhere: bool = True) -> None:
        """system_anywhere: whether the chat template takes system messages after the first message; if not, they become
        user messages.
        """
        self.references: set[str] = set()
        """The names of the tools that the search for tools has found."""
        self._said: list[_Said] = []
        self._system_anywhere = system_anywhere
        self._called: dict[str, str] = {}
        """The tool of each call, by the id of the call as the template sees it."""

    def found(self) -> list[dict[str, Any]]:
        """The messages."""
        return [said.message() for said in self._said]

    def add_system(self, system: str | Sequence[dict[str, Any]] | None) -> Iterator[None]:
        """Add the parameter `system`; yields after each block. Raises ApiError."""
        for text in _texts(system, "system"):
            if prompt := _without_billing_header(text):
                self._continue(SYSTEM).texts.append(prompt)
            yield

    def add(self, message: Message, where: str) -> Iterator[None]:
        """Add a message; yields after each block. where: its position, for errors. Raises ApiError."""
        role = message.role
        if role not in ROLES:
            raise invalid(f"{where}.role is {excerpt(role)!r}; it must be one of {', '.join(ROLES)}", f"{where}.role")
        if message.clear_at is not None and role != SYSTEM:
            raise invalid(f"{where}.clear_at is allowed only in a message of role {SYSTEM}", f"{where}.clear_at")
        if role == SYSTEM and not self._system_anywhere and self._said and self._said[-1].role != SYSTEM:
            role = USER
        if role == ASSISTANT:
            yield from self._add_answer(message, where)
            return
        for block, place in _blocks(message, where):
            if isinstance(block, ToolResultBlock):
                self._add_result(block, place)
            elif isinstance(block, TextBlock):
                self._continue(role).texts.append(block.text)
            yield
        if not message.content:
            self._continue(role)

    def _add_answer(self, message: Message, where: str) -> Iterator[None]:
        """Add what the assistant said; its texts are one."""
        said = self._continue(ASSISTANT)
        texts: list[str] = []
        for block, place in _blocks(message, where):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    said.reasoning.append(_reasoning(block, place))
                case ToolUseBlock():
                    said.calls.append(_call(block))
                    self._called[said.calls[-1]["id"]] = block.name
            yield
        said.texts.append("".join(texts))

    def _add_result(self, block: ToolResultBlock, where: str) -> None:
        text = "\n".join(_texts(block.content, f"{where}.content", self.references))
        if block.is_error and not text.lstrip().lower().startswith("error"):
            text = ERROR + text
        call_id = _template_id(block.tool_use_id)
        name = {"name": self._called[call_id]} if call_id in self._called else {}
        self._said.append(_Said(TOOL, [text], others={"tool_call_id": call_id, **name}))

    def _continue(self, role: str) -> _Said:
        """The last message if it is of this role, else a new one."""
        if not self._said or self._said[-1].role != role:
            self._said.append(_Said(role))
        return self._said[-1]


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
_KINDS: dict[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}


def _blocks(message: Message, where: str) -> Iterator[tuple[Block, str]]:
    """The blocks of a message, and where each stands. Raises ApiError."""
    if isinstance(message.content, str):
        if message.content:
            yield TextBlock("text", message.content), f"{where}.content"
        return
    for index, given in enumerate(message.content):
        place = f"{where}.content[{index}]"
        kind = given.get("type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise _unsupported(kind, place)
        roles = OF_ROLE[kind]
        if message.role not in roles:
            raise invalid(f"{place}: a block of type {kind} is allowed only in a message of role {roles[0]}", place)
        yield convert(given, _KINDS[kind], place), place


def _texts(
    content: str | Sequence[dict[str, Any]] | None, where: str, references: set[str] | None = None
) -> Iterator[str]:
    """The texts of `content`, which may hold nothing but text. Raises ApiError.

    references: receives the names in tool references, whose text is the name; None: there must be none.
    """
    if isinstance(content, str):
        yield content
        return
    for index, given in enumerate(content or ()):
        place = f"{where}[{index}]"
        if given.get("type") == "tool_reference" and references is not None:
            name = convert(given, ToolReferenceBlock, place).tool_name
            references.add(name)
            yield name
            continue
        if given.get("type") != "text":
            raise _unsupported(given.get("type"), place)
        yield convert(given, TextBlock, place).text


def _unsupported(kind: object, where: str) -> ApiError:
    if kind is None:
        return invalid(f"{where}.type is missing", f"{where}.type", "missing_required_parameter")
    return invalid(
        f"{where} is of type {excerpt(str(kind))!r}, which this server cannot give to the model; it takes text only: "
        "leave the block out, or send its text",
        f"{where}.type",
    )


def _without_billing_header(text: str) -> str:
    """`text` without a first line that is no part of the prompt."""
    if not text.startswith(BILLING_HEADER):
        return text
    return text.partition("\n")[2].lstrip("\n")


def _reasoning(block: ThinkingBlock, where: str) -> str:
    """The text of a thinking block, which its signature may carry."""
    try:
        return block.thinking or signature.carried(block.signature)
    except ValueError as error:
        raise invalid(f"{where}.signature: {error}; send blocks back as they came", f"{where}.signature") from None


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": _template_id(block.id), "type": "function", "function": function}


def _template_id(tool_use_id: str) -> str:
    """The id of a call as the model's format has it."""
    return tool_use_id.removeprefix(ID_PREFIX)
