"""Request bodies: every supported parameter with its type. Any other parameter is refused by name."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from engine.core.config import ServerConfig
from engine.core.protocols import (
    NUMBERS_PER_VALUE,
    explain,
    has_unknown_field,
    surely_fits,
    value_counts,
    without_unknown_nulls,
)
from engine.core.unicode import decode_json
from engine.server.front_end.errors import ApiError, excerpt
from engine.server.http.chat_tools import Tool
from engine.server.http.errors import invalid
from engine.server.http.messages import Message, TextPart


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options` of both APIs."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Extension: with include_usage, every chunk has the usage so far."""
    include_obfuscation: Literal[False] | None = None
    """Only false: events are not padded."""


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """`structured_outputs` of both APIs, by the names of vLLM; at most one is given."""

    json: dict[str, Any] | str | bool | None = None
    """A JSON schema, also as a text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A grammar in Lark."""
    structural_tag: dict[str, Any] | str | None = None
    """A format of texts, special tokens and parts with grammars, also as JSON."""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters shared by completions and chat completions. None: the default of the model or the server."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None
    """Free text naming the end user; has no effect."""
    # Extensions of OpenAI's parameters; its client sends them with `extra_body`.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: None = None


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """`prediction` of chat: what the answer most likely is."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Extension: additional variables of the chat template."""
    reasoning_effort: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    # Parameters of which only values that ask for nothing are accepted, or that say who asks.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None
    """Only false: the server stores nothing."""
    modalities: list[Literal["text"]] | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    """in-memory is an older spelling."""
    verbosity: Literal["medium"] | None = None
    """medium, OpenAI's default, asks for nothing."""
    # OpenAI's parameters that this server does not support: only null is accepted.
    audio: None = None
    function_call: None = None
    functions: None = None
    web_search_options: None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    """Only with a prompt; None: true. A chat template adds its own special tokens."""


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


T = TypeVar("T", bound=msgspec.Struct)

REPLACED = {"functions": "tools", "function_call": "tool_choice"}
"""Old parameters of chat, and those that have replaced them."""
CONTENT_ENCODINGS = frozenset({"br", "compress", "deflate", "gzip", "x-compress", "x-gzip", "zstd"})
"""Encodings of a body that HTTP has. Clients also send other words, such as "utf-8", with a plain body."""

_SMALL_BODY = 2**16
"""Bytes of a body that is decoded in a few milliseconds, whatever it holds."""
_SETTING = "server.max_body_bytes"


async def read(request: Request, kind: type[T], limits: ServerConfig) -> T:
    """Read and decode the request's body. Raises ApiError naming the parameter at fault, or with status 413."""
    body = await _body(request, limits.max_body_bytes, _SETTING)
    if len(body) > _SMALL_BODY and not surely_fits(body, limits.max_body_values):
        await check_values(body, limits.max_body_values)
    return decode(body, kind)


async def read_optional(request: Request, kind: type[T], limits: ServerConfig) -> T:
    """As `read`, for routes that take few parameters; an empty body is one without any."""
    if limits.max_body_bytes > _SMALL_BODY:
        body = await _body(request, _SMALL_BODY, f"the limit of {request.url.path}")
    else:
        body = await _body(request, limits.max_body_bytes, _SETTING)
    return decode(body or b"{}", kind)


async def check_values(body: bytes, max_values: int) -> None:
    """Raise ApiError with status 413 if decoding the JSON `body` would take long, because of many small values.

    max_values: strings, lists and objects; NUMBERS_PER_VALUE times as many numbers are allowed. Counts without
    decoding, and lets the event loop run meanwhile.
    """
    for values, commas in value_counts(body):
        if values > max_values or commas > max_values * NUMBERS_PER_VALUE:
            raise ApiError(
                413,
                f"the body holds more than {max_values} strings, lists and objects (server.max_body_values), or more "
                f"than {max_values * NUMBERS_PER_VALUE} numbers; send several smaller requests",
            )
        await asyncio.sleep(0)


async def _body(request: Request, max_bytes: int, limit: str) -> bytes:
    """The whole body. limit: what `max_bytes` is, for refusals. Raises ApiError."""
    _check_encoding(request)
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > max_bytes:
        raise _too_large(max_bytes, limit)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise _too_large(max_bytes, limit)
    except ClientDisconnect:
        raise invalid("the client disconnected before sending the whole body") from None
    return bytes(body)


def _check_encoding(request: Request) -> None:
    """Raise ApiError with status 415 for a compressed body (RFC 9110, section 15.5.16)."""
    given = ", ".join(request.headers.getlist("content-encoding"))
    if any(name.strip().lower() in CONTENT_ENCODINGS for name in given.split(",")):
        raise ApiError(
            415,
            f"the body has the content-encoding {excerpt(given)!r}, which this server does not decode; send it plain",
            code="unsupported_content_encoding",
            headers={"accept-encoding": "identity"},
        )


def _too_large(max_bytes: int, limit: str) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {max_bytes} bytes ({limit}); send a smaller one",
        headers={"connection": "close"},
    )


def decode(body: bytes, kind: type[T]) -> T:
    """Decode the JSON `body` as one of the types above. Raises ApiError."""
    try:
        return decode_json(body, lambda data: _decode(data, kind))
    except msgspec.ValidationError as error:
        raise explain(str(error), kind=kind, replaced=REPLACED) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None


def _decode(body: bytes, kind: type[T]) -> T:
    """Decode `body`; unknown fields are refused unless they are null. Raises what msgspec raises."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if not has_unknown_field(str(error)):
            raise
    return msgspec.convert(without_unknown_nulls(msgspec.json.decode(body), kind), kind, str_keys=True)
