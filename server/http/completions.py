"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import attrs
from attrs import define
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.core.types import Request as EngineRequest, SamplingParams, TokenLogprobs
from engine.server.http import params as parameters
from engine.server.http.errors import invalid
from engine.server.http.generation import Delta, EventStream, Generation, Template, Usage
from engine.server.http.logprobs import completion_logprobs, prompt_offsets
from engine.server.http.request_bodies import CompletionBody, read
from engine.server.http.responses import answer, event, stream
from engine.server.http.service import Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def routes(service: Service) -> APIRouter:
    """The routes of this file."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionBody, service.limits.max_body_bytes)
        service.check_model(body.model)
        prompts = await _prompts(service, body)
        params = _params(service, body, [len(prompt.tokens) for prompt in prompts])
        name = f"cmpl-{uuid.uuid4().hex}"
        tokens = [prompt.tokens for prompt in prompts]
        requests = service.requests(name, tokens, params, body.priority, body.cache_salt)
        job = _Job(service, body, name, prompts, requests)
        headers = {"x-request-id": name}
        if body.stream:
            return stream(job.events(), headers)
        return answer(job.body, headers)

    return router


@define
class Prompt:
    """A prompt as tokens, and as text when that is echoed."""

    tokens: list[int]
    text: str = ""


async def _prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    """The prompts of the four forms of `prompt`. Raises ApiError."""
    given: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and all(type(token) is int for token in given):
        given = [given]
    limit = service.limits.max_prompts
    if not 1 <= len(given) <= limit:
        raise invalid(f"prompt must hold from 1 to {limit} prompts (server.max_prompts), not {len(given)}", "prompt")
    prompts = []
    for item in given:
        if isinstance(item, str):
            prompt = Prompt(await service.encode(item), item)
        elif isinstance(item, list):
            parameters.check_tokens(item, service.vocab_size, "prompt")
            skip = body.skip_special_tokens is not False
            prompt = Prompt(item, service.tokenizer.decode(item, skip_special_tokens=skip) if body.echo else "")
        else:
            raise invalid("prompt must be a text, a list of texts, of token ids, or of lists of token ids", "prompt")
        if not prompt.tokens:
            raise invalid("a prompt is empty; it must have at least one token", "prompt")
        prompts.append(prompt)
    return prompts


def _params(service: Service, body: CompletionBody, lengths: Sequence[int]) -> list[SamplingParams]:
    """For each prompt in turn, the parameters of its n choices. Raises ApiError."""
    limits = service.limits
    parameters.check_stream_options(body)
    n = parameters.choices(body, limits)
    if body.best_of is not None and body.best_of != n:
        raise invalid("best_of is not supported: it must be left out or equal n", "best_of")
    params = parameters.sampling_params(body, service.default_params, limits, service.vocab_size)
    if body.logprobs is not None:
        parameters.check_logprobs(body.logprobs, limits, "logprobs")
        params = attrs.evolve(params, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None)
    default = service.default_params.max_tokens or DEFAULT_MAX_TOKENS
    return [
        parameters.seed(choice, index)
        for length in lengths
        for choice in [parameters.max_tokens(body.max_tokens, "max_tokens", default, params, length, service.max_len)]
        for index in range(n)
    ]


class _Job:
    """One completion request under way."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        name: str,
        prompts: Sequence[Prompt],
        requests: Sequence[EngineRequest],
    ) -> None:
        self._service = service
        self._body = body
        self._prompts = prompts
        self._each = len(requests) // len(prompts)
        self._requests = requests
        self._head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": service.name}
        self._fresh = set(range(len(requests)))

    async def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [_plain(index, "") for index in range(len(self._requests))]
        with self._generation() as generation:
            while generation.running:
                for delta in await generation.next():
                    _extend(choices[delta.choice], self._choice(delta))
        return self._head | {"choices": choices, "usage": generation.usage.body()}

    def events(self) -> EventStream:
        """The answer in pieces."""
        options = self._body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}

        def chunk(choice: dict[str, Any]) -> bytes:
            return event(self._head | {"choices": [choice]} | usage)

        def any_event(delta: Delta) -> bytes:
            choice = self._choice(delta)
            return chunk(choice) if choice["text"] or choice["finish_reason"] or choice["logprobs"] else b""

        templates = [
            Template.of(lambda text, index=index: chunk(_plain(index, text)))  # type: ignore[misc]
            for index in range(len(self._requests))
        ]

        def last(count: Usage) -> bytes:
            return event(self._head | {"choices": [], "usage": count.body()}) if usage else b""

        return EventStream(self._generation(), templates, any_event, last)

    def _generation(self) -> Generation:
        return Generation(self._service.client, self._service.tokenizer, self._requests, len(self._prompts))

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """A delta as an element of choices; with echo, the prompt comes before a choice's first text."""
        prompt = self._prompts[delta.choice // self._each]
        text, logprobs = delta.text, None
        echo = bool(self._body.echo) and delta.choice in self._fresh
        self._fresh.discard(delta.choice)
        if self._body.logprobs is not None:
            before = len(prompt.text) if self._body.echo else 0
            entries: list[TokenLogprobs | None] = list(delta.logprobs)
            offsets = [before + offset for offset in delta.offsets]
            if echo:
                entries = [None, *(delta.prompt_logprobs or ()), *entries]
                offsets = prompt_offsets(self._service.tokenizer, prompt.tokens, prompt.text) + offsets
            if entries:
                logprobs = completion_logprobs(
                    self._service.tokenizer, entries, offsets, self._body.logprobs, prompt.tokens[0]
                )
        if echo:
            text = prompt.text + text
        return _plain(delta.choice, text) | {"logprobs": logprobs, "finish_reason": delta.finish_reason}


def _plain(choice: int, text: str) -> dict[str, Any]:
    """An element of choices that has nothing but text."""
    return {"index": choice, "text": text, "logprobs": None, "finish_reason": None}


def _extend(whole: dict[str, Any], piece: dict[str, Any]) -> None:
    """Lay a piece of a choice behind what there is."""
    whole["text"] += piece["text"]
    whole["finish_reason"] = piece["finish_reason"]
    if whole["logprobs"] is None:
        whole["logprobs"] = piece["logprobs"]
    elif piece["logprobs"] is not None:
        for name, values in piece["logprobs"].items():
            whole["logprobs"][name] += values
