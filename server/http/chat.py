"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.core.parsers import Content, Event
from engine.core.types import Request as EngineRequest, SamplingParams, TokenLogprobs
from engine.server.front_end.errors import excerpt
from engine.server.http import params as parameters
from engine.server.http.chat_message import ChatMessage
from engine.server.http.errors import invalid
from engine.server.http.generation import Delta
from engine.server.http.job import Job
from engine.server.http.logprobs import JsonLists, chat_logprobs
from engine.server.http.parsed_output import OutputFormat
from engine.server.http.request_bodies import ChatBody, read
from engine.server.http.responses import SendResponse, prepared
from engine.server.http.service import Service
from engine.server.http.structured_output import parameter_of_grammar
from engine.server.http.tools import offered_tools

EFFORT = "reasoning_effort"
"""Variable of chat templates that say how much to reason, and parameter of the request."""
ENABLE_THINKING = "enable_thinking"
"""Variable of chat templates that turn reasoning on and off."""


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatBody, service.limits)
        return prepared(partial(_respond, service, body))

    return router


async def _respond(service: Service, body: ChatBody) -> SendResponse:
    """Check and tokenize a request. Raises ApiError or InvalidRequestError."""
    service.check_model(body.model)
    params = _params(service, body)
    parser = service.parser
    tools = offered_tools(body.tools, body.tool_choice, readable=parser is not None and parser.reads_calls)
    if tools and params.grammar is not None:
        name = parameter_of_grammar(body)
        raise invalid(f"{name} cannot be combined with tools: an output that matches it calls none", name)
    variables = template_variables(service, body)
    prompt = await service.encode_chat(body.messages, variables, tools, salt=body.cache_salt or "")
    params = _max_tokens(service, body, params, len(prompt.tokens))
    name = f"chatcmpl-{uuid.uuid4().hex}"
    requests = service.requests(name, [prompt.tokens], [params], body)
    output_format = None
    if parser is not None and params.grammar is None:  # a grammar is that of the content, from the first token on
        output_format = OutputFormat(
            begin=partial(parser.begin, prompt.text, tools),
            keep=service.parser_tokens,
            one_call=body.parallel_tool_calls is False,
        )
    return _ChatJob(service, body, name, requests, output_format).response()


def template_variables(service: Service, body: ChatBody) -> Mapping[str, Any]:
    """The additional variables of the chat template. Raises ApiError for a reasoning_effort that it cannot express."""
    variables = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort
    if effort is None:
        return variables
    template = service.parser.templates.chat if service.parser is not None else ""
    found: dict[str, Any] = {}
    if EFFORT in template:
        found = {EFFORT: effort}
    elif effort == "none" and ENABLE_THINKING in template:
        found = {ENABLE_THINKING: False}
    if both := found.keys() & variables.keys():
        raise invalid(f"chat_template_kwargs has {min(both)}; give either that or {EFFORT}", EFFORT)
    if found:
        return variables | found
    raise invalid(
        f"this model's chat template has no place for {EFFORT} {excerpt(effort)!r}; leave it out"
        + (f", or set {ENABLE_THINKING} in chat_template_kwargs" if ENABLE_THINKING in template else ""),
        EFFORT,
    )


def _params(service: Service, body: ChatBody) -> SamplingParams:
    """All sampling parameters except max_tokens, which depends on the prompt length. Raises ApiError."""
    parameters.check_stream_options(body)
    parameters.num_choices(body, service.limits)
    if body.store:
        raise invalid("store must be false: this server stores nothing", "store")
    params = parameters.sampling_params(body, service.default_params, service.limits, service.vocab_size)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs is allowed only with logprobs: true", "top_logprobs")
        parameters.check_logprobs(body.top_logprobs, service.limits, "top_logprobs")
    return attrs.evolve(params, logprobs=body.top_logprobs or 0) if body.logprobs else params


def _max_tokens(service: Service, body: ChatBody, params: SamplingParams, prompt_len: int) -> SamplingParams:
    """`params` with max_tokens, under either of its two names. Raises ApiError."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens and max_completion_tokens differ; give only one of them", "max_tokens")
    given, name = body.max_completion_tokens, "max_completion_tokens"
    if given is None:
        given, name = body.max_tokens, "max_tokens"
    return parameters.with_max_tokens(
        given, name, service.default_params.max_tokens, params, prompt_len, service.max_len
    )


class _ChatJob(Job[ChatBody]):
    """One chat request in progress."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        name: str,
        requests: Sequence[EngineRequest],
        output_format: OutputFormat | None,
    ) -> None:
        super().__init__(service, body, name, requests, output_format)
        new_id = str if service.parser is None else service.parser.new_call_id
        self._messages = [ChatMessage(new_id) for _ in range(self.num_choices)]
        self._logprob_lists = [JsonLists("content") for _ in range(self.num_choices)]
        self._finish_reasons: list[str | None] = [None] * self.num_choices

    def _add(self, delta: Delta) -> Iterator[None]:
        for event in _events(delta):
            self._messages[delta.choice].add(event)
        self._finish_reasons[delta.choice] = delta.finish_reason
        if logprobs := self._logprobs(delta.logprobs):
            self._logprob_lists[delta.choice].extend(content=logprobs["content"])
        yield

    def _choice_body(self, choice: int) -> dict[str, Any]:
        logprobs = self._logprob_lists[choice].body() | {"refusal": None} if self.body.logprobs else None
        message = self._messages[choice]
        return {
            "index": choice,
            "message": message.body(),
            "logprobs": logprobs,
            "finish_reason": message.finish_reason(self._finish_reasons[choice]),
        } | message.error

    def _text_event(self, choice: int, text: str) -> bytes:
        return self._delta_event(choice, {"content": text})

    def _delta_events(self, delta: Delta) -> Iterator[bytes]:
        """The role before a choice's first text, then the text, then the finish reason, each an event of its own.

        What is parsed begins when it is known what the first text is, so that `content` is null before anything else.
        """
        message, choice = self._messages[delta.choice], delta.choice
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        deltas = [found for event in _events(delta) if (found := message.delta(event)) is not None]
        if logprobs is not None and not deltas:
            deltas = [{"content": ""} if delta.events is None else {}]
        if (deltas or delta.finish_reason is not None or delta.events is None) and self._is_first(choice):
            null = bool(deltas) and "content" not in deltas[0]
            yield self._delta_event(choice, {"role": "assistant", "content": None if null else ""})
        for found in deltas:
            yield self._delta_event(choice, found, logprobs)
            logprobs = None
        if delta.finish_reason is not None:
            yield self._delta_event(choice, {}, None, message.finish_reason(delta.finish_reason), message.error)

    def _delta_event(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        others: Mapping[str, Any] = {},
    ) -> bytes:
        return self._chunk({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason, **others})

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.service.tokenizer, entries, self.body.top_logprobs or 0)


def _events(delta: Delta) -> Sequence[Event]:
    """What a delta says; all of its text is content if it is not parsed."""
    if delta.events is not None:
        return delta.events
    return (Content(delta.text),) if delta.text else ()
