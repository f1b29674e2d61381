"""The state that all routes share: the engine client, the tokenizer, limits, model facts, draining."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from attrs import frozen

from engine.core.config import EngineConfig, ServerConfig, served_name
from engine.core.errors import InvalidRequestError
from engine.core.parsers import Parser
from engine.core.plugin_host import owner_of
from engine.core.protocols import json_size
from engine.core.text import TokenCache, Tokenizer
from engine.core.tokens import Tokens
from engine.core.types import Request, SamplingParams
from engine.server.front_end.engine_client import EngineClient
from engine.server.front_end.errors import ApiError, excerpt
from engine.server.front_end.request_trace import Tracer
from engine.server.http.call_arguments import with_arguments, with_objects
from engine.server.http.errors import ErrorBody, invalid
from engine.server.http.messages import Message, template_message
from engine.server.http.parser_faults import parser_faults
from engine.server.http.text_threads import TextThreads
from engine.server.metrics.reports import EngineReport, Route
from engine.server.shared.heartbeat import Fault
from engine.server.shared.messages import Started
from engine.server.shared.metrics_table import FrontEndPhase

P = ParamSpec("P")
T = TypeVar("T")

NO_TOKENS = Tokens()
TEMPLATE_ARGUMENTS = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")
"""Parameters of Tokenizer.chat, which chat_template_kwargs must not contain."""
THREAD_CHARS = 8192
"""Longer texts are tokenized in a thread, so that running streams are not delayed."""
THREAD_TOKENS = 1024
"""More tokens are decoded in a thread."""
BATCH_CHARS = 65536
"""Characters of several prompts after which other clients' texts get their turn."""
MESSAGE_CHARS = 64
"""A message costs a chat template as much time as tokenizing this many characters."""
MESSAGES_AT_A_TIME = 1000
"""Messages that are checked without a pause."""
LONG_TOKEN_CHARS = 8
"""Texts with more characters per token of the context are probably too long, which is checked before tokenizing."""


@frozen
class ChatPrompt:
    """A chat up to the assistant's answer."""

    text: str
    tokens: Tokens


class Service:
    """What the routes need of the front end process."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        tokenizer: Tokenizer,
        started: Started,
        created: int,
        parser: Parser[Any] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """started: one replica's message. created: start of the server, time.time().

        parser: None: outputs are not parsed. tracer: None: requests are not traced.
        """
        self.tracer = tracer
        self.parser = parser
        self.parser_tokens = _special_tokens(tokenizer, parser.special_tokens) if parser is not None else frozenset()
        """Special tokens that stay in the text, for the parser."""
        self.limits: ServerConfig = config.server
        self.client = client
        self.tokenizer = tokenizer
        self.name = served_name(config)
        self.speculates = bool(config.speculator.name)
        """Whether steps verify drafts."""
        self._prefix_caching = config.cache.prefix_caching
        self.max_grammar_chars = config.grammar.max_chars
        self.revision = config.model.revision or None
        """The commit of a model from the hub; None for another."""
        self.created = created
        self.max_len = started.max_len
        self.vocab_size = started.vocab_size
        self.default_params: SamplingParams = started.default_params
        self.draining = False
        self.error_bodies: dict[str, ErrorBody] = {}
        """The shape of error responses of each path, and of those below it, whose errors are not OpenAI's."""
        self.http_routes: Sequence[Route] = ()
        """The routes whose requests are counted, by slot of HttpMetrics."""
        self.active = 0
        """Number of POST requests being answered."""
        self._threads = TextThreads()
        self._token_cache = TokenCache(tokenizer, config.server.token_cache_bytes)

    @property
    def supervisor(self) -> int:
        """Process ID of the supervisor, which is the parent of a front end; 0: there is none."""
        return os.getppid()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a POST request while it is answered."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    def new_call_id(self) -> str:
        """An id for a tool call to which the model has given none, in the model's format."""
        if self.parser is None:
            return f"call_{uuid.uuid4().hex}"
        with parser_faults(owner_of(type(self.parser)), "new_call_id"):
            return self.parser.new_call_id()

    def engine_reports(self) -> Sequence[EngineReport]:
        """State and statistics of each replica, for /metrics."""
        return [
            EngineReport(
                up=link.down is None,
                stats=link.stats,
                startup=link.started.cache.phases if link.started is not None else (),
                restarts=link.incarnation,
                cache=link.started.cache if link.started is not None else None,
                prefix_caching=self._prefix_caching,
                pid=link.started.pid if link.started is not None and link.down is None else 0,
            )
            for link in self.client.links
        ]

    def faults(self) -> Sequence[Fault | None]:
        """The fault of each replica, or None, without asking the engine processes."""
        return [link.fault(self.limits.health_timeout) for link in self.client.links]

    async def probe(self) -> Sequence[float | Fault]:
        """Make each replica compute a step; the seconds until it completed, or the replica's fault."""
        return await asyncio.gather(*(link.probe(self.limits.health_timeout) for link in self.client.links))

    def check_model(self, model: str | None) -> None:
        """Raise ApiError unless `model` is the served model or None."""
        if model is not None and model != self.name:
            raise ApiError(
                404,
                f"this server has no model {excerpt(model)!r}; it serves {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def requests(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        cache_key: str = "",
        prediction: Tokens = NO_TOKENS,
    ) -> list[Request]:
        """One engine request per prompt, with its `params`.

        name: ID of the HTTP request. n: choices per prompt. salt: prefixes are shared only with requests of the same
        salt. cache_key: requests of one key go to the same replica, if it is not overloaded. prediction: the predicted
        output. Raises ApiError for more choices than the server ever accepts.
        """
        now = time.monotonic()
        choices = len(prompts) * n
        if choices > self.limits.max_waiting:
            raise invalid(
                f"the request asks for {choices} choices, but the server accepts at most {self.limits.max_waiting} "
                "at a time (server.max_waiting); request fewer",
                "n" if choices > len(prompts) else "prompt",
            )
        return [
            Request(
                id=f"{name}-{index}",
                prompt=prompt,
                params=each,
                priority=priority,
                arrival=now,
                salt=salt,
                cache_key=cache_key,
                prediction=prediction,
            )
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]

    async def encode(self, text: str, *, special: bool = True, param: str | None = None) -> list[int]:
        """Tokenize `text`; special: add special tokens; param: where it stands in the request.

        Raises ApiError for a long text that the context cannot hold.
        """
        if len(text) < THREAD_CHARS:
            return self._timed("tokenize", self.tokenizer.encode)(text, add_special_tokens=special)
        return await self._in_thread("tokenize", partial(self._encode_long, text, special, param))

    async def encode_prediction(self, text: str, param: str) -> Tokens:
        """Tokenize an output that is predicted; param: where it stands in the request. Raises ApiError for one that the
        context cannot hold."""
        tokens = await self.encode(text, special=False, param=param)
        if len(tokens) > self.max_len:
            raise self._too_long(f"the predicted output has {len(tokens)}", param)
        return Tokens(tokens)

    async def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize several prompts, one after another, so that other clients' texts get their turns. See `encode`."""
        tokens: list[list[int]] = []
        for batch in _batches(texts):
            if sum(map(len, batch)) < THREAD_CHARS:
                tokens += map(self._timed("tokenize", self.tokenizer.encode), batch)
                await asyncio.sleep(0)
            else:
                tokens += await self._in_thread("tokenize", partial(list, map(self._encode_long, batch)))
        return tokens

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of tokens."""
        decode = partial(self.tokenizer.decode, tokens, skip_special_tokens=skip_special_tokens)
        if len(tokens) < THREAD_TOKENS:
            return self._timed("detokenize", decode)()
        return await self._in_thread("detokenize", decode)

    async def encode_chat(self, messages: Sequence[Message]) -> ChatPrompt:
        """Render and tokenize the messages of a chat. Raises ApiError or InvalidRequestError."""
        return await self.encode_conversation(await self.template_messages(messages))

    async def template_messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as chat templates expect them. Raises ApiError."""
        self._check_number(messages, "messages")
        plain = []
        for index, message in enumerate(messages):
            plain.append(template_message(message, f"messages[{index}]"))
            if index % MESSAGES_AT_A_TIME == MESSAGES_AT_A_TIME - 1:
                await asyncio.sleep(0)
        return plain

    async def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        parameter: str = "messages",
        *,
        salt: str = "",
    ) -> ChatPrompt:
        """Render and tokenize a conversation up to the assistant's answer.

        messages: as chat templates expect them, `content` a text. variables: additional variables of the chat template,
        none of TEMPLATE_ARGUMENTS. tools: as chat templates expect them. parameter: that of the messages, for refusals.
        salt: cached tokens are shared only between conversations of the same salt, as prefixes are. Raises ApiError or
        InvalidRequestError.
        """
        self._check_number(messages, parameter)
        given = dict(variables or {}) | ({"tools": tools} if tools else {})
        chat = partial(self._encode_chat, messages, given, parameter, salt)
        return await self.work(chat, MESSAGE_CHARS * len(messages), messages, given)

    async def work(self, work: Callable[[], T], least: int, *values: object) -> T:
        """Run work that takes about as long as tokenizing the JSON of `values`; in a thread if that is long.

        least: characters to add to those of the values.
        """
        size = least + sum(json_size(value, THREAD_CHARS) for value in values)
        if size < THREAD_CHARS:
            return self._timed("tokenize", work)()
        return await self._in_thread("tokenize", work)

    async def _in_thread(self, phase: FrontEndPhase, work: Callable[[], T]) -> T:
        return await self._threads.run(self.client.traced(phase, self.client.phases.timed_in_thread(phase, work)))

    def _timed(self, phase: FrontEndPhase, work: Callable[P, T]) -> Callable[P, T]:
        """`work` on the event loop, counted as the phase's and shown in traces."""
        return self.client.traced(phase, self.client.phases.timed(phase, work))

    def _check_number(self, messages: Sequence[object], parameter: str) -> None:
        if len(messages) > self.max_len:
            raise self._too_long(f"the chat has {len(messages)} messages", parameter)

    @property
    def chat_template(self) -> str:
        """Source of the chat template, the one for tools if there are several; empty if there is none."""
        return self.tokenizer.templates.chat

    def render(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
        """Render a conversation. given: arguments of Tokenizer.render_chat. Raises InvalidRequestError."""
        if self.parser is not None:
            with parser_faults(owner_of(type(self.parser)), "template_message"):
                messages = [self.parser.template_message(message) for message in messages]
        return self.tokenizer.render_chat(messages, **given)

    def _encode_chat(
        self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any], parameter: str, salt: str
    ) -> ChatPrompt:
        messages = with_arguments(messages, self.limits.max_body_values, parameter)
        text = self._render_calls(messages, given)
        self._check_length(text)
        return ChatPrompt(text, self._token_cache.encode(text, salt))

    def _render_calls(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> str:
        """Render a conversation. If the template accepts only objects, arguments that are not JSON objects are replaced
        by their complete members."""
        try:
            return self.render(messages, **given)
        except InvalidRequestError:
            objects = with_objects(messages)
            if objects == messages:
                raise
        return self.render(objects, **given)

    def _encode_long(self, text: str, special: bool = True, param: str | None = None) -> list[int]:
        """Tokenize a text of any length in a time that is bounded by the context's. Raises ApiError."""
        self._check_length(text, param)
        return self.tokenizer.encode(text, add_special_tokens=special)

    def _check_length(self, text: str, param: str | None = None) -> None:
        """Raise ApiError for a text that surely has more tokens than the context holds."""
        if len(text) > self.max_len * LONG_TOKEN_CHARS and self.tokenizer.exceeds(text, self.max_len):
            raise self._too_long(f"a text has {len(text)} characters, which are more tokens", param)

    def _too_long(self, reason: str, param: str | None = None) -> ApiError:
        message = f"this model's context holds {self.max_len} tokens, but {reason}; send less"
        return invalid(message, param, "context_length_exceeded")


def _special_tokens(tokenizer: Tokenizer, texts: Sequence[str] | None) -> frozenset[int]:
    """The special tokens with one of these texts; None: all."""
    if texts is None:
        return tokenizer.special_tokens
    wanted = {text.encode() for text in texts}
    return frozenset(token for token in tokenizer.special_tokens if tokenizer.token_bytes(token) in wanted)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Group texts in order, so that each group but the last has about BATCH_CHARS characters."""
    batch: list[str] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
