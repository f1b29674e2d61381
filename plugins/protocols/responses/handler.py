"""The routes: from a request to a Conversation, and the fields of the response that follow from it."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import attrs
import msgspec

from engine.core.errors import InvalidRequestError
from engine.core.grammars import Grammar
from engine.core.protocols import API, ApiError, Call, Conversation, ParameterNames, Reply, Routes, excerpt
from engine.plugins.protocols.responses.body import (
    INCLUDED,
    NOTHING_TO_INCLUDE,
    SAMPLING,
    InputTokensBody,
    ResponsesBody,
    TextFormat,
)
from engine.plugins.protocols.responses.input import template_messages
from engine.plugins.protocols.responses.output import new_id
from engine.plugins.protocols.responses.tools import Tools, read_choice, read_tools
from engine.plugins.protocols.responses.writer import Answer, ResponseWriter

PATH = "/v1/responses"
SKIPPED_TOOLS = "x-skipped-tools"
"""Header of a response that names the tools that were not offered to the model."""
NAMES = ParameterNames(
    messages="input", max_tokens="max_output_tokens", grammar="text.format", effort="reasoning.effort"
)

_log = logging.getLogger(__name__)


def register(routes: Routes) -> None:
    """Add the routes."""
    handler = ResponsesApi(routes)
    routes.post(PATH, ResponsesBody, handler.respond, api=API, summary="Create a response", streams=True)
    routes.post(
        f"{PATH}/input_tokens",
        InputTokensBody,
        handler.count_tokens,
        api=API,
        summary="The number of input tokens of a response",
    )


class ResponsesApi:
    """Answers the requests of both routes."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._logged: set[str] = set()
        """Types of tools that the log has named."""

    async def respond(self, body: ResponsesBody, _: Call) -> Reply:
        """Check and tokenize a request. Raises ApiError or InvalidRequestError."""
        routes = self._routes
        routes.check_model(body.model)
        check(body)
        tools = self._read_tools(body)
        include = body.include or ()
        with_logprobs = "message.output_text.logprobs" in include
        conversation = attrs.evolve(
            await conversation_of(body, tools),
            sampling={name: getattr(body, name) for name in SAMPLING},
            max_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if with_logprobs else None,
            priority=body.priority or 0,
            salt=body.cache_salt,
            cache_key=body.prompt_cache_key,
        )
        name = new_id("resp")
        answer = Answer(
            name=name,
            fields=_fields(routes, body, tools),
            offered=tools.offered,
            new_call_id=routes.new_call_id,
            token_bytes=routes.token_bytes,
            top_logprobs=conversation.logprobs,
            with_encrypted="reasoning.encrypted_content" in include,
            with_summary=body.reasoning is not None and body.reasoning.summarized is not None,
        )
        headers = {SKIPPED_TOOLS: ", ".join(map(_header, dict.fromkeys(tools.skipped)))} if tools.skipped else None
        return await routes.respond(
            name, conversation, ResponseWriter(answer), stream=bool(body.stream), headers=headers
        )

    async def count_tokens(self, body: InputTokensBody, _: Call) -> Reply:
        """Count the tokens of a request's prompt. Raises ApiError or InvalidRequestError."""
        self._routes.check_model(body.model)
        check_input(body)
        conversation = await conversation_of(body, self._read_tools(body))
        count = await self._routes.count_tokens(conversation)
        return self._routes.json({"object": "response.input_tokens", "input_tokens": count})

    def _read_tools(self, body: InputTokensBody) -> Tools:
        """The tools of a request; logs each type that is not offered once, since agents send them with each request."""
        tools = read_tools(body.tools)
        for kind in tools.skipped:
            if kind not in self._logged and len(self._logged) < 100:
                self._logged.add(kind)
                _log.warning("%s: tools of type %r are not offered to the model", PATH, kind)
        return tools


async def conversation_of(body: InputTokensBody, tools: Tools) -> Conversation:
    """What the prompt is made of. Raises ApiError or InvalidRequestError."""
    return Conversation(
        messages=await messages_of(body),
        tools=tools.functions,
        tool_choice=read_choice(body.tool_choice, tools),
        parallel_calls=body.parallel_tool_calls is not False,
        variables=body.chat_template_kwargs or {},
        effort=body.reasoning.effort if body.reasoning is not None else None,
        grammar=_grammar(body.text.format if body.text is not None else None),
        names=NAMES,
    )


async def messages_of(body: InputTokensBody) -> list[dict[str, Any]]:
    """The messages of a request. Raises ApiError."""
    messages = await template_messages(() if body.input is None else body.input, body.instructions)
    if not messages:
        _refuse("input", "is empty; give a text or items")
    return messages


def check_input(body: InputTokensBody) -> None:
    """Raise ApiError for what would change the prompt and is not supported."""
    stateless = "this server stores nothing; send the whole conversation as input"
    if body.previous_response_id is not None:
        _refuse("previous_response_id", f"is not supported: {stateless}")
    if body.conversation is not None:
        _refuse("conversation", f"is not supported: {stateless}")
    if body.truncation not in (None, "disabled"):
        _refuse("truncation", "must be disabled: this server shortens no conversation")


def check(body: ResponsesBody) -> None:
    """Raise ApiError for what would change the answer and is not supported."""
    check_input(body)
    if body.prompt is not None:
        _refuse("prompt", "is not supported: this server stores no prompts; send instructions and input")
    if body.background:
        _refuse("background", "must be false: this server stores nothing; stream the response instead")
    if body.store:
        _refuse("store", "must be false: this server stores nothing")
    if body.stream_options is not None and not body.stream:
        _refuse("stream_options", "is allowed only with stream: true")
    include = body.include or ()
    for name in include:
        if name not in (*INCLUDED, *NOTHING_TO_INCLUDE):
            _refuse("include", f"has {excerpt(name)!r}; this server can include {' and '.join(INCLUDED)}")
    if body.top_logprobs and "message.output_text.logprobs" not in include:
        _refuse("top_logprobs", 'is allowed only with include: ["message.output_text.logprobs"]')


def _grammar(asked: TextFormat | None) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Grammar.json_object()
    if asked.name is None or asked.schema is None:
        missing = "name" if asked.name is None else "schema"
        raise ApiError(
            400,
            f"text.format.{missing} is missing; a json_schema has both name and schema",
            param=f"text.format.{missing}",
            code="missing_required_parameter",
        )
    try:
        return Grammar.json_schema(asked.schema)
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param="text.format.schema") from None


def _fields(routes: Routes, body: ResponsesBody, tools: Tools) -> dict[str, Any]:
    """What a response repeats of its request, with the defaults that hold."""
    defaults = routes.default_params
    text_format = body.text.format if body.text is not None else None
    reasoning = body.reasoning
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": routes.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summarized if reasoning is not None else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if text_format is None else _given(text_format)},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools.shown,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    } | ({"skipped_tools": tools.skipped} if tools.skipped else {})


def _given(value: msgspec.Struct) -> dict[str, Any]:
    """The fields of a structure that are not null."""
    return {name: found for name, found in msgspec.structs.asdict(value).items() if found is not None}


def _header(text: str) -> str:
    """A text as part of a header: other characters than those of names become question marks."""
    return "".join(char if char.isascii() and (char.isalnum() or char in " _.:/-") else "?" for char in text)


def _refuse(param: str, reason: str) -> NoReturn:
    raise ApiError(400, f"{param} {reason}", param=param)
