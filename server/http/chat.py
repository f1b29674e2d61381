"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.core.protocols import Conversation, Delta, ParameterNames, Template
from engine.core.types import TokenLogprobs
from engine.server.http import params as parameters
from engine.server.http.chat_message import ChatMessage
from engine.server.http.chat_tools import chosen_tools, custom_names, function_tools
from engine.server.http.choices_writer import ChoicesWriter
from engine.server.http.conversation import respond
from engine.server.http.errors import invalid
from engine.server.http.generation import Templates
from engine.server.http.logprobs import JsonLists, chat_logprobs
from engine.server.http.request_bodies import ChatBody, StreamOptions, read
from engine.server.http.responses import SendResponse, prepared
from engine.server.http.service import Service
from engine.server.http.structured_output import parameter_of_grammar, requested_grammar


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
    parameters.check_stream_options(body)
    n = parameters.num_choices(body, service.limits)
    if body.store:
        raise invalid("store must be false: this server stores nothing", "store")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs is allowed only with logprobs: true", "top_logprobs")
    max_tokens, max_tokens_name = _max_tokens(body)
    conversation = Conversation(
        messages=await service.template_messages(body.messages),
        tools=function_tools(body.tools),
        tool_choice=chosen_tools(body.tool_choice),
        parallel_calls=body.parallel_tool_calls is not False,
        variables=body.chat_template_kwargs or {},
        effort=body.reasoning_effort,
        sampling=parameters.given_params(body),
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=await service.work(partial(requested_grammar, body), 0, body.response_format or {}),
        n=n,
        priority=body.priority or 0,
        salt=body.cache_salt,
        cache_key=body.prompt_cache_key,
        prediction=None if body.prediction is None else body.prediction.text,
        names=ParameterNames(max_tokens=max_tokens_name, grammar=parameter_of_grammar(body)),
    )
    name = f"chatcmpl-{uuid.uuid4().hex}"
    messages = [
        ChatMessage(
            service.new_call_id,
            named_call=conversation.tool_choice.name is not None,
            custom=custom_names(body.tools),
        )
        for _ in range(n)
    ]
    writer = ChatWriter(service, name, messages, body.stream_options, conversation.logprobs)
    return await respond(service, name, conversation, writer, stream=bool(body.stream))


def _max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """The limit of the answer, under either of its two names, and the name. Raises ApiError."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens and max_completion_tokens differ; give only one of them", "max_tokens")
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


class ChatWriter(ChoicesWriter):
    """Writes the answer of one chat completion."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        service: Service,
        name: str,
        messages: Sequence[ChatMessage],
        options: StreamOptions | None,
        logprobs: int | None,
    ) -> None:
        """name: id of the response. messages: one per choice, empty. logprobs: number of most likely tokens to report;
        None: no log probabilities.
        """
        num_choices = len(messages)
        super().__init__(name, service.name, num_choices, options)
        self._tokenizer = service.tokenizer
        self._top_logprobs = logprobs
        self._messages = messages
        self._early: set[int] = set()
        """Choices of a stream whose first event was sent before their first content, reasoning or call was known."""
        self._logprob_lists = [JsonLists("content") for _ in range(num_choices)]
        self._finish_reasons: list[str | None] = [None] * num_choices

    def add(self, delta: Delta) -> Iterator[None]:
        for event in delta.said:
            self._messages[delta.choice].add(event)
        self._finish_reasons[delta.choice] = delta.finish_reason
        if delta.finish_reason is not None:
            self._messages[delta.choice].end(delta.finish_reason, streamed=False)
        if logprobs := self._logprobs(delta.logprobs):
            self._logprob_lists[delta.choice].extend(content=logprobs["content"])
        yield

    def _choice_body(self, choice: int) -> dict[str, Any]:
        logprobs = None if self._top_logprobs is None else self._logprob_lists[choice].body() | {"refusal": None}
        message = self._messages[choice]
        return {
            "index": choice,
            "message": message.body(),
            "logprobs": logprobs,
            "finish_reason": message.finish_reason(self._finish_reasons[choice]),
        } | message.error

    def reasoning_templates(self) -> Mapping[int, Template] | None:
        return None if self._continuous_usage else Templates(self._reasoning_event)

    def _text_event(self, choice: int, text: str) -> bytes:
        return self._delta_event(choice, {"content": text})

    def _reasoning_event(self, choice: int, text: str) -> bytes:
        return self._delta_event(choice, {"reasoning_content": text})

    def _delta_events(self, delta: Delta) -> Iterator[bytes]:
        """The role before a choice's first text, then the text, then the finish reason, each an event of its own.

        A parsed choice begins once its first delta is known, so that `content` is null unless that delta is content.
        """
        message, choice = self._messages[delta.choice], delta.choice
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        deltas = [found for event in delta.said if (found := message.delta(event)) is not None]
        if logprobs is not None and not deltas:
            deltas = [{"content": ""} if delta.events is None else {}]
        if deltas or delta.finish_reason is not None or delta.events is None:
            yield from self._beginnings(choice, deltas, finished=delta.finish_reason is not None)
        for found in deltas:
            yield self._delta_event(choice, found, logprobs)
            logprobs = None
        if delta.finish_reason is not None:
            message.end(delta.finish_reason, streamed=True, stop_string=delta.stop_string)
            yield self._delta_event(choice, {}, None, message.finish_reason(delta.finish_reason), message.error)

    def _beginnings(self, choice: int, deltas: Sequence[Mapping[str, Any]], *, finished: bool) -> Iterator[bytes]:
        """The first event of a choice, after the first events of all choices with lower numbers.

        deltas: the choice's new ones; an empty one carries only log probabilities. OpenAI's client numbers choices in
        the order in which they begin. A choice that had to begin early has `content` null, which becomes empty if
        nothing else comes.
        """
        said = next(filter(None, deltas), None)
        early = said is None and bool(deltas) and not finished
        if self._is_first(choice):
            for before in filter(self._is_first, range(choice)):
                self._early.add(before)
                yield self._delta_event(before, {"role": "assistant", "content": None})
            if early:
                self._early.add(choice)
            null = early if said is None else "content" not in said
            yield self._delta_event(choice, {"role": "assistant", "content": None if null else ""})
        elif choice in self._early and not early:
            self._early.discard(choice)
            if said is None:
                yield self._delta_event(choice, {"content": ""})

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
        if self._top_logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, entries, self._top_logprobs)
