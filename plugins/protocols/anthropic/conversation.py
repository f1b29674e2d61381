"""The messages of a request as chat templates expect them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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


class TemplateMessages:
    """Collects messages as chat templates expect them.

    Each of Anthropic's messages may become several: the results of tools are messages of their own. Neighbours of one
    role become one message, whose texts are lines of their own.
    """

    def __init__(self, *, system_anywhere: bool = True) -> None:
        """system_anywhere: whether the chat template takes system messages after the first message; if not, those are
        said by the user.
        """
        self.found: list[dict[str, Any]] = []
        self.references: set[str] = set()
        """The names of the tools that the search for tools has found."""
        self._system_anywhere = system_anywhere
        self._called: dict[str, str] = {}
        """The tool of each call, by the id of the call as the template sees it."""

    def add_system(self, system: str | Sequence[dict[str, Any]] | None) -> Iterator[None]:
        """Add the parameter `system`; yields after each block. Raises ApiError."""
        texts = []
        for text in _texts(system, "system"):
            texts.append(_without_billing_header(text))
            yield
        if said := "\n".join(filter(None, texts)):
            self._append(SYSTEM, said)

    def add(self, message: Message, where: str) -> Iterator[None]:
        """Add a message; yields after each block. where: its position, for errors. Raises ApiError."""
        if message.role not in ROLES:
            raise invalid(
                f"{where}.role is {excerpt(message.role)!r}; it must be one of {', '.join(ROLES)}", f"{where}.role"
            )
        if message.clear_at is not None and message.role != SYSTEM:
            raise invalid(f"{where}.clear_at is allowed only in a message of role {SYSTEM}", f"{where}.clear_at")
        if message.role == ASSISTANT:
            yield from self._add_answer(message, where)
            return
        role = message.role
        if role == SYSTEM and not self._system_anywhere and self.found and self.found[-1]["role"] != SYSTEM:
            role = USER
        texts: list[str] = []
        for block, place in _blocks(message, where):
            if isinstance(block, ToolResultBlock):
                self._append_texts(role, texts)
                self._append_result(block, place)
            elif isinstance(block, TextBlock):
                texts.append(block.text)
            yield
        self._append_texts(role, texts)
        if not message.content:
            self._append(role, "")

    def _add_answer(self, message: Message, where: str) -> Iterator[None]:
        """Add what the assistant said."""
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for block, place in _blocks(message, where):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    reasoning.append(_reasoning(block, place))
                case ToolUseBlock():
                    calls.append(_call(block))
                    self._called[calls[-1]["id"]] = block.name
            yield
        others: dict[str, Any] = {}
        if any(reasoning):
            others["reasoning_content"] = "\n".join(filter(None, reasoning))
        if calls:
            others["tool_calls"] = calls
        self._append(ASSISTANT, "".join(texts), **others)

    def _append_result(self, block: ToolResultBlock, where: str) -> None:
        text = "\n".join(_texts(block.content, f"{where}.content", self.references))
        if block.is_error and not text.lstrip().lower().startswith("error"):
            text = ERROR + text
        call_id = _template_id(block.tool_use_id)
        name = {"name": self._called[call_id]} if call_id in self._called else {}
        self.found.append({"role": TOOL, "content": text, "tool_call_id": call_id, **name})

    def _append_texts(self, role: str, texts: list[str]) -> None:
        """Append a message of several texts, if there are any, and forget them."""
        if texts:
            self._append(role, "\n".join(texts))
            texts.clear()

    def _append(self, role: str, content: str, **others: Any) -> None:
        """Append a message, or continue the last one if it is of the same role."""
        last = self.found[-1] if self.found else {}
        if last.get("role") != role:
            self.found.append({"role": role, "content": content, **others})
            return
        last["content"] = "\n".join(filter(None, (last["content"], content)))
        if "reasoning_content" in others:
            earlier = last.get("reasoning_content")
            last["reasoning_content"] = "\n".join(filter(None, (earlier, others["reasoning_content"])))
        if "tool_calls" in others:
            last["tool_calls"] = [*last.get("tool_calls", ()), *others["tool_calls"]]


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
    """The texts of what may hold nothing else. Raises ApiError.

    references: gets the names of tools in references to tools, whose text is the name; None: there may be none.
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
