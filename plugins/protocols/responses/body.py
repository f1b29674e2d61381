"""The bodies of POST /v1/responses and POST /v1/responses/input_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")
"""What `include` may add to a response."""
NOTHING_TO_INCLUDE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""What `include` may name, but no response of this server has."""
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
)
"""Parameters that SamplingParams has too."""


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`reasoning`."""

    effort: str | None = None
    summary: Literal["auto", "detailed"] | None = None
    """Either way all of the reasoning comes as the summary."""
    generate_summary: Literal["auto", "detailed"] | None = None
    """An older name of summary."""

    @property
    def summarized(self) -> str | None:
        """What summary was asked for, under either name."""
        return self.summary or self.generate_summary


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`text.format`. A schema is always enforced, whatever `strict` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class Text(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """medium, OpenAI's default, asks for nothing."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_obfuscation: Literal[False] | None = None
    """Only false: events are not padded."""


class InputTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses/input_tokens: what the prompt is made of."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    truncation: str | None = None
    # Need what the server has stored.
    conversation: Any = None
    previous_response_id: str | None = None
    # Extensions of OpenAI's parameters; its client sends them with `extra_body`.
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesBody(InputTokensBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. None: the default of the model or the server."""

    model: str
    input: str | list[dict[str, Any]]
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Parameters of which only values that ask for nothing are accepted, or that say who asks.
    background: bool | None = None
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    """Limits calls of tools that the server runs; there are none."""
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    """in-memory is an older spelling."""
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None
    """Null counts as false, and responses say false: the server stores nothing."""
    user: str | None = None
    prompt: Any = None
    """Needs what the server has stored."""
    # OpenAI's parameters that this server does not support: only null is accepted.
    context_management: None = None
    moderation: None = None
    # Extensions, as above.
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
