"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import attrs
from attrs import define
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.core.protocols import Delta
from engine.core.types import SamplingParams, TokenLogprobs
from engine.server.http import params as parameters
from engine.server.http.choices_writer import ChoicesWriter
from engine.server.http.errors import invalid
from engine.server.http.job import Job
from engine.server.http.logprobs import JsonLists, completion_logprobs, prompt_offsets
from engine.server.http.request_bodies import CompletionBody, read
from engine.server.http.responses import SendResponse, prepared
from engine.server.http.service import Service
from engine.server.http.structured_output import parameter_of_grammar
from engine.server.shared.packed_logprobs import SLICE, unpack

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionBody, service.limits)
        return prepared(partial(_respond, service, body))

    return router


async def _respond(service: Service, body: CompletionBody) -> SendResponse:
    """Check and tokenize a request. Raises ApiError or InvalidRequestError."""
    service.check_model(body.model)
    prompts = await _prompts(service, body)
    params = _params(service, body, [len(prompt.tokens) for prompt in prompts])
    name = f"cmpl-{uuid.uuid4().hex}"
    tokens = [prompt.tokens for prompt in prompts]
    n = parameters.num_choices(body, service.limits)
    requests = service.requests(
        name,
        tokens,
        params,
        n=n,
        priority=body.priority or 0,
        salt=body.cache_salt or "",
        cache_key=body.prompt_cache_key or "",
    )
    if len(requests) > 1:
        await asyncio.sleep(0)  # streams get their turn before many prompts are sent
    writer = CompletionWriter(service, name, body, prompts, n)
    return Job(
        service,
        name,
        requests,
        writer,
        stream=bool(body.stream),
        choices_per_prompt=n,
        grammar_parameter=parameter_of_grammar(body),
        operation="text_completion",
    ).response()


@define
class Prompt:
    """A prompt as tokens, and as text if the text is echoed."""

    tokens: list[int]
    text: str = ""


async def _prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    """Tokenize `prompt`: a text, a list of texts, a list of token ids, or a list of such lists. Raises ApiError."""
    given: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if given and type(given[0]) is int:
        given = [given]
    limit = service.limits.max_prompts
    if not 1 <= len(given) <= limit:
        raise invalid(f"prompt must hold from 1 to {limit} prompts (server.max_prompts), not {len(given)}", "prompt")
    texts = iter(await service.encode_prompts([item for item in given if isinstance(item, str)]))
    prompts = []
    for item in given:
        prompt = Prompt(next(texts), item) if isinstance(item, str) else await _given_tokens(service, body, item)
        if not prompt.tokens:
            raise invalid("a prompt is empty; give at least one token", "prompt")
        prompts.append(prompt)
    return prompts


async def _given_tokens(service: Service, body: CompletionBody, tokens: Any) -> Prompt:
    """A prompt that is given as token ids. Raises ApiError."""
    if isinstance(tokens, list):
        parameters.check_room(len(tokens), service.max_len)
    if not isinstance(tokens, list) or set(map(type, tokens)) - {int}:
        raise invalid("prompt must be a text, a list of texts, of token ids, or of lists of token ids", "prompt")
    parameters.check_tokens(tokens, service.vocab_size, "prompt")
    await asyncio.sleep(0)  # streams get their turns between many prompts
    return Prompt(tokens, await service.decode(tokens, body.skip_special_tokens is not False) if body.echo else "")


def _params(service: Service, body: CompletionBody, lengths: Sequence[int]) -> list[SamplingParams]:
    """The parameters of each prompt's choices, from the prompts' lengths. Raises ApiError."""
    limits = service.limits
    parameters.check_stream_options(body)
    n = parameters.num_choices(body, limits)
    if body.best_of is not None and body.best_of != n:
        raise invalid("best_of is not supported; leave it out, or set it to n", "best_of")
    params = parameters.sampling_params(body, service.default_params, limits, service.vocab_size)
    if body.logprobs is not None:
        parameters.check_logprobs(body.logprobs, limits, "logprobs")
        params = attrs.evolve(params, logprobs=body.logprobs, prompt_logprobs=body.logprobs if body.echo else None)
    default = service.default_params.max_tokens or DEFAULT_MAX_TOKENS
    return [
        parameters.with_max_tokens(body.max_tokens, "max_tokens", default, params, length, service.max_len)
        for length in lengths
    ]


class CompletionWriter(ChoicesWriter):
    """Writes the answer of one completion request."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self, service: Service, name: str, request: CompletionBody, prompts: Sequence[Prompt], choices_per_prompt: int
    ) -> None:
        """name: id of the response."""
        super().__init__(name, service.name, len(prompts) * choices_per_prompt, request.stream_options)
        self._tokenizer = service.tokenizer
        self._request = request
        self._choices_per_prompt = choices_per_prompt
        self._prompts = prompts
        self._texts: list[list[str]] = [[] for _ in range(self.num_choices)]
        self._logprob_lists: dict[int, JsonLists] = {}
        self._finish_reasons: list[str | None] = [None] * self.num_choices

    def add(self, delta: Delta) -> Iterator[None]:
        choice = delta.choice
        for piece in self._pieces(delta):
            self._texts[choice].append(piece["text"])
            self._finish_reasons[choice] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                self._logprob_lists.setdefault(choice, JsonLists()).extend(**piece["logprobs"])
            yield

    def _choice_body(self, choice: int) -> dict[str, Any]:
        logprobs = self._logprob_lists.get(choice)
        return _text_choice(choice, "".join(self._texts[choice])) | {
            "logprobs": None if logprobs is None else logprobs.body(),
            "finish_reason": self._finish_reasons[choice],
        }

    def _text_event(self, choice: int, text: str) -> bytes:
        return self._chunk(_text_choice(choice, text))

    def _delta_events(self, delta: Delta) -> Iterator[bytes]:
        for piece in self._pieces(delta):
            if piece["text"] or piece["finish_reason"] or piece["logprobs"]:
                yield self._chunk(piece)

    def _pieces(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """A delta as elements of `choices`: one, but several for the log probabilities of a long prompt.

        With echo, the prompt precedes the first text of a choice.
        """
        prompt = self._prompts[delta.choice // self._choices_per_prompt]
        text, entries, offsets = delta.text, list[TokenLogprobs | None](delta.logprobs), delta.offsets
        if self._request.echo and self._request.logprobs is not None:
            offsets = [len(prompt.text) + offset for offset in offsets]
        if self._request.echo and self._is_first(delta.choice):
            begin = 0
            if self._request.logprobs is not None:
                slices = self._prompt_slices(prompt, delta.prompt_logprobs)
                last_entries, last_offsets = next(slices)
                for next_entries, next_offsets in slices:
                    end = next_offsets[0]
                    yield self._piece(delta.choice, prompt.text[begin:end], last_entries, last_offsets)
                    begin, last_entries, last_offsets = end, next_entries, next_offsets
                entries, offsets = last_entries + entries, last_offsets + offsets
            text = prompt.text[begin:] + text
        yield self._piece(delta.choice, text, entries, offsets) | {"finish_reason": delta.finish_reason}

    def _prompt_slices(
        self, prompt: Prompt, packed: Sequence[bytes]
    ) -> Iterator[tuple[list[TokenLogprobs | None], list[int]]]:
        """The log probabilities of a prompt's tokens and the tokens' offsets, a slice at a time."""
        entries = chain([None], unpack(packed))
        offsets = prompt_offsets(self._tokenizer, prompt.tokens, prompt.text)
        while some := list(islice(offsets, SLICE)):
            yield list(islice(entries, len(some))), some

    def _piece(
        self, choice: int, text: str, entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """An element of `choices` that has not finished."""
        piece = _text_choice(choice, text)
        if entries and self._request.logprobs is not None:
            first_token = self._prompts[choice // self._choices_per_prompt].tokens[0]
            piece["logprobs"] = completion_logprobs(
                self._tokenizer, entries, offsets, self._request.logprobs, first_token
            )
        return piece


def _text_choice(choice: int, text: str) -> dict[str, Any]:
    """An element of `choices` with nothing but text."""
    return {"index": choice, "text": text, "logprobs": None, "finish_reason": None}
