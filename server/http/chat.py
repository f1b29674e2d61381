"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.core.types import Request as EngineRequest, SamplingParams, TokenLogprobs
from engine.server.http import params as parameters
from engine.server.http.errors import invalid
from engine.server.http.generation import Delta
from engine.server.http.job import Job
from engine.server.http.logprobs import JsonLists, chat_logprobs
from engine.server.http.request_bodies import ChatBody, read
from engine.server.http.responses import SendResponse, prepared
from engine.server.http.service import Service


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
    prompt = await service.encode_chat(body.messages, body.chat_template_kwargs)
    params = _max_tokens(service, body, params, len(prompt))
    name = f"chatcmpl-{uuid.uuid4().hex}"
    requests = service.requests(name, [prompt], [params], body)
    return _ChatJob(service, body, name, requests).response()


def _params(service: Service, body: ChatBody) -> SamplingParams:
    """All sampling parameters except max_tokens, which depends on the prompt length. Raises ApiError."""
    parameters.check_stream_options(body)
    parameters.num_choices(body, service.limits)
    if body.response_format not in (None, {"type": "text"}):
        raise invalid('response_format must be {"type": "text"}; other formats are not supported', "response_format")
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

    def __init__(self, service: Service, body: ChatBody, name: str, requests: Sequence[EngineRequest]) -> None:
        super().__init__(service, body, name, requests)
        self._texts: list[list[str]] = [[] for _ in range(self.num_choices)]
        self._logprob_lists = [JsonLists("content") for _ in range(self.num_choices)]
        self._finish_reasons: list[str | None] = [None] * self.num_choices

    def _add(self, delta: Delta) -> Iterator[None]:
        self._texts[delta.choice].append(delta.text)
        self._finish_reasons[delta.choice] = delta.finish_reason
        if logprobs := self._logprobs(delta.logprobs):
            self._logprob_lists[delta.choice].extend(content=logprobs["content"])
        yield

    def _choice_body(self, choice: int) -> dict[str, Any]:
        logprobs = self._logprob_lists[choice].body() | {"refusal": None} if self.body.logprobs else None
        return {
            "index": choice,
            "message": {"role": "assistant", "content": "".join(self._texts[choice]), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": self._finish_reasons[choice],
        }

    def _text_event(self, choice: int, text: str) -> bytes:
        return self._delta_event(choice, {"content": text})

    def _delta_events(self, delta: Delta) -> Iterator[bytes]:
        """The role before a choice's first text, then the text, then the finish reason, each an event of its own."""
        if self._is_first(delta.choice):
            yield self._delta_event(delta.choice, {"role": "assistant", "content": ""})
        if delta.text or delta.logprobs:
            yield self._delta_event(delta.choice, {"content": delta.text}, self._logprobs(delta.logprobs))
        if delta.finish_reason is not None:
            yield self._delta_event(delta.choice, {}, None, delta.finish_reason)

    def _delta_event(
        self, choice: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> bytes:
        return self._chunk({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.service.tokenizer, entries, self.body.top_logprobs or 0)
