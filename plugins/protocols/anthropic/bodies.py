"""Request bodies: every parameter that is accepted, with its type. Any other parameter is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

CacheControl = dict[str, Any]
"""A mark for Anthropic's prompt cache; has no effect: the prefix cache needs no marks."""


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str | list[dict[str, Any]]
    clear_at: Literal["never"] | None = None
    """Of a system message: until when the model sees it."""


class TextBlock(msgspec.Struct, forbid_unknown_fields=True):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None
    """Of an earlier answer; ignored: prompts have no citations."""


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, forbid_unknown_fields=True):
    """Reasoning of an earlier answer that only another server can read."""

    type: Literal["redacted_thinking"]
    data: str


class Caller(msgspec.Struct, forbid_unknown_fields=True):
    """Who called a tool."""

    type: Literal["direct"]


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class ToolReferenceBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that the search for tools has found, in the result of that tool."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = None


class ClientTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Has no effect: streams always have arguments as they are generated."""
    defer_loading: bool | None = None
    """Whether the model may call it only once a tool_reference has named it."""
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """`thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "updates", "omitted"] | None = None
    """Omitted: no text. Otherwise the text comes as the model wrote it."""


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: None = None


class KeepAll(msgspec.Struct, forbid_unknown_fields=True):
    """All of it is kept."""

    type: Literal["all"]


class ContextEdit(msgspec.Struct, forbid_unknown_fields=True):
    """A change of the conversation: only the one that changes nothing is accepted."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeepAll


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    """`context_management`."""

    edits: list[ContextEdit] | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """`metadata`."""

    user_id: str | None = None
    """Names the end user; has no effect."""


class Diagnostics(msgspec.Struct, forbid_unknown_fields=True):
    """`diagnostics`: asks why the cache was not used. The answer is that this server cannot say."""

    previous_message_id: str | None = None


class CountTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens: what the prompt is made of."""

    model: str
    messages: list[Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name of output_config.format."""
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    mcp_servers: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None
    speed: Literal["standard"] | None = None


class MessagesBody(CountTokensBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Diagnostics | None = None
    thread: dict[str, Any] | None = None
    """Asks the server to hold the conversation; refused with the code after which clients send it whole."""
    # Extensions, as in the other APIs.
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    # Anthropic's parameters that this server does not support: only null is accepted.
    container: None = None
    inference_geo: None = None
