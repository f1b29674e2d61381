"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import attrs
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.core.types import Request as EngineRequest, SamplingParams, TokenLogprobs
from engine.server.http import params as parameters
from engine.server.http.errors import invalid
from engine.server.http.generation import Delta, EventStream, Generation, Template, Usage
from engine.server.http.logprobs import chat_logprobs
from engine.server.http.request_bodies import ChatBody, read
from engine.server.http.responses import answer, event, stream
from engine.server.http.service import Service


def routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatBody, service.limits.max_body_bytes)
        service.check_model(body.model)
        params = _params(service, body)
        prompt = await service.encode_chat(body.messages, body.chat_template_kwargs)
        params = _max_tokens(service, body, params, len(prompt))
        choices = [parameters.seed(params, index) for index in range(parameters.choices(body, service.limits))]
        name = f"chatcmpl-{uuid.uuid4().hex}"
        job = _Job(service, body, name, service.requests(name, [prompt], choices, body.priority, body.cache_salt))
        headers = {"x-request-id": name}
        if body.stream:
            return stream(job.events(), headers)
        return answer(job.body, headers)

    return router


def _params(service: Service, body: ChatBody) -> SamplingParams:
    """Everything but max_tokens, which depends on the prompt's length. Raises ApiError."""
    parameters.check_stream_options(body)
    parameters.choices(body, service.limits)
    if body.response_format not in (None, {"type": "text"}):
        raise invalid('response_format must be {"type": "text"}; no other is supported', "response_format")
    params = parameters.sampling_params(body, service.default_params, service.limits, service.vocab_size)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise invalid("top_logprobs is allowed only with logprobs: true", "top_logprobs")
        parameters.check_logprobs(body.top_logprobs, service.limits, "top_logprobs")
    return attrs.evolve(params, logprobs=body.top_logprobs or 0) if body.logprobs else params


def _max_tokens(service: Service, body: ChatBody, params: SamplingParams, prompt_len: int) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    given, name = body.max_completion_tokens, "max_completion_tokens"
    if given is None:
        given, name = body.max_tokens, "max_tokens"
    return parameters.max_tokens(given, name, service.default_params.max_tokens, params, prompt_len, service.max_len)


class _Job:
    """One chat request under way."""

    def __init__(self, service: Service, body: ChatBody, name: str, requests: Sequence[EngineRequest]) -> None:
        self._service = service
        self._body = body
        self._requests = requests
        self._head = {"id": name, "created": int(time.time()), "model": service.name}

    async def body(self) -> dict[str, Any]:
        """The whole answer."""
        texts: list[list[str]] = [[] for _ in self._requests]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in self._requests]
        reasons: list[str | None] = [None] * len(self._requests)
        with self._generation() as generation:
            while generation.running:
                for delta in await generation.next():
                    texts[delta.choice].append(delta.text)
                    logprobs[delta.choice] += delta.logprobs
                    reasons[delta.choice] = delta.finish_reason
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
                "logprobs": self._logprobs(logprobs[index]),
                "finish_reason": reasons[index],
            }
            for index in range(len(self._requests))
        ]
        return self._head | {"object": "chat.completion", "choices": choices, "usage": generation.usage.body()}

    def events(self) -> EventStream:
        """The answer in pieces: the role, then text as it comes, the finish reason, and the usage if asked for."""
        options = self._body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        head = self._head | {"object": "chat.completion.chunk"}
        fresh = set(range(len(self._requests)))

        def chunk(choice: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
            entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return event(head | {"choices": [entry]} | usage)

        def any_event(delta: Delta) -> bytes:
            data = b""
            if delta.choice in fresh:
                fresh.discard(delta.choice)
                data += chunk(delta.choice, {"role": "assistant", "content": ""})
            if delta.text or delta.logprobs:
                data += chunk(delta.choice, {"content": delta.text}, self._logprobs(delta.logprobs))
            if delta.finish_reason is not None:
                data += chunk(delta.choice, {}, None, delta.finish_reason)
            return data

        templates = [
            Template.of(lambda text, index=index: chunk(index, {"content": text}))  # type: ignore[misc]
            for index in range(len(self._requests))
        ]

        def last(count: Usage) -> bytes:
            return event(head | {"choices": [], "usage": count.body()}) if usage else b""

        return EventStream(self._generation(), templates, any_event, last)

    def _generation(self) -> Generation:
        return Generation(self._service.client, self._service.tokenizer, self._requests, prompts=1)

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._service.tokenizer, entries, self._body.top_logprobs or 0)
