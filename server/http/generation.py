"""The choices of one HTTP request on their way: outputs in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import msgspec
from attrs import define, field

from engine.core.text import Detokenizer, Tokenizer
from engine.core.types import FINISH_ERROR, FINISH_STOP, Output, Request, TokenLogprobs
from engine.server.front_end.engine_client import EngineClient
from engine.server.front_end.errors import ApiError
from engine.server.front_end.request_group import Group, News

_json = msgspec.json.Encoder().encode


@define
class Delta:
    """What is new for one choice."""

    choice: int
    text: str = ""
    offsets: list[int] = field(factory=list)
    """Where in the choice's text each new token begins, characters."""
    logprobs: list[TokenLogprobs] = field(factory=list)
    """For each new token, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None


@define
class Usage:
    """Tokens of one HTTP request; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def body(self) -> dict[str, object]:
        """As both APIs report it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@define
class Template:
    """An event around its text: most events of a stream differ in nothing else."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, event: Callable[[str], bytes]) -> Template:
        """From a function that makes the event of a text."""
        mark = "<text>"  # the last one: the model's name, which may hold anything, comes before
        before, _, after = event(mark).rpartition(_json(mark))
        return cls(before, after)


class Generation:
    """Runs requests and detokenizes what comes. Leaving its `with` block aborts what still runs."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, requests: Sequence[Request], prompts: int) -> None:
        """requests: the choices in order, equally many for each of the `prompts` prompts."""
        self._client = client
        self._requests = requests
        self._texts = [Detokenizer(tokenizer, request.prompt, request.params) for request in requests]
        self._each = len(requests) // prompts
        self._begun: set[int] = set()
        self.running = set(range(len(requests)))
        """Choices that have not finished."""
        self._group: Group | None = None
        self._prompt_tokens = sum(len(request.prompt) for request in requests[:: self._each])
        self._cached_tokens = 0

    def __enter__(self) -> Generation:
        self._group = self._client.submit(self._requests)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        self._group.__exit__(kind, error, trace)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        made = sum(text.num_tokens for text in self._texts)
        return Usage(self._prompt_tokens, made, self._cached_tokens)

    async def next(self) -> list[Delta]:
        """What is new, one delta a choice at most; waits for it. Raises ApiError when a choice failed."""
        assert self._group is not None
        deltas: dict[int, Delta] = {}
        for news in await self._group.next():
            choice = news[0]
            if choice in self.running:
                self._feed(news, deltas.setdefault(choice, Delta(choice)))
        return list(deltas.values())

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, which must not raise, whenever `events` has something new."""
        assert self._group is not None
        self._group.listen(listener)

    def write_later(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Call `write(data)` when all listeners have been called: see EngineClient.write_later."""
        self._client.write_later(write, data)

    def events(self, templates: Sequence[Template], event: Callable[[Delta], bytes]) -> bytes:
        """What is new as server-sent events, one for each output that has something to say.

        templates: for each choice, the event of text alone; event: makes any other, such as the first or the last.
        Raises ApiError when a choice failed.
        """
        assert self._group is not None
        data = []
        for news in self._group.take():
            choice, tokens, output = news
            if choice not in self.running:
                continue
            if output is None:
                text = self._texts[choice]
                new = text.push(tokens)
                if text.stop_string is not None:
                    data.append(event(Delta(choice, new, finish_reason=self._stop(choice))))
                elif new:
                    template = templates[choice]
                    data += (template.before, _json(new), template.after)
            else:
                delta = Delta(choice)
                self._feed(news, delta)
                data.append(event(delta))
        return b"".join(data)

    def _feed(self, news: News, delta: Delta) -> None:
        choice, tokens, output = news
        if output is None:
            text = self._texts[choice]
            delta.text += text.push(tokens)
            if text.stop_string is not None:
                delta.finish_reason = self._stop(choice)
        else:
            self._feed_whole(choice, output, delta)

    def _feed_whole(self, choice: int, output: Output, delta: Delta) -> None:
        if output.finish_reason == FINISH_ERROR:
            # What the engine refuses at the door is the request's fault, what breaks later is ours.
            status = 500 if choice in self._begun else 400
            raise ApiError(status, output.error or "the engine gave up on this request")
        if choice not in self._begun:
            self._begun.add(choice)
            if choice % self._each == 0:
                self._cached_tokens += output.cached_tokens
        piece = self._texts[choice].feed(output)
        delta.text += piece.text
        delta.offsets += piece.offsets
        delta.logprobs += piece.logprobs
        delta.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
        delta.finish_reason = piece.finish_reason
        if output.finish_reason is not None:
            self.running.discard(choice)
        elif piece.finish_reason is not None:
            self._stop(choice)

    def _stop(self, choice: int) -> str:
        """A stop string has ended a choice, which the engine does not know yet; the finish reason."""
        assert self._group is not None
        self.running.discard(choice)
        self._group.abort(choice, FINISH_STOP)
        return FINISH_STOP


@define
class EventStream:
    """A generation as server-sent events."""

    generation: Generation
    templates: Sequence[Template]
    """For each choice, the event of text alone."""
    event: Callable[[Delta], bytes]
    """Makes any other."""
    last: Callable[[Usage], bytes]
    """What comes behind all choices."""

    def take(self) -> bytes:
        """The events that have come. Raises ApiError when a choice failed."""
        generation = self.generation
        data = generation.events(self.templates, self.event)
        return data if generation.running else data + self.last(generation.usage)
