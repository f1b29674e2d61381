"""The choices of one HTTP request on their way: outputs in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from attrs import define, field

from engine.core.text import Detokenizer, Tokenizer
from engine.core.types import FINISH_ERROR, FINISH_STOP, Output, Request, TokenLogprobs
from engine.server.engine_client import EngineClient, Group
from engine.server.errors import ApiError


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


class Generation:
    """Runs requests and detokenizes what comes. Leaving its `with` block aborts what still runs."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, requests: Sequence[Request], prompts: int) -> None:
        """requests: the choices in order, equally many for each of the `prompts` prompts."""
        self._client = client
        self._requests = requests
        self._choices = {request.id: index for index, request in enumerate(requests)}
        self._texts = [Detokenizer(tokenizer, request.prompt, request.params) for request in requests]
        self._each = len(requests) // prompts
        self._begun: set[int] = set()
        self._running = set(range(len(requests)))
        self._group: Group | None = None
        self.usage = Usage(sum(len(request.prompt) for request in requests[:: self._each]))

    def __enter__(self) -> Generation:
        self._group = self._client.submit(self._requests)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._group is not None
        self._group.__exit__(kind, error, trace)

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        return not self._running

    async def next(self) -> list[Delta]:
        """What is new, one delta a choice at most; waits for it. Raises ApiError when a choice failed."""
        assert self._group is not None
        deltas: dict[int, Delta] = {}
        for output in await self._group.next():
            choice = self._choices[output.request]
            if choice in self._running:
                self._feed(choice, output, deltas.setdefault(choice, Delta(choice)))
        return list(deltas.values())

    def _feed(self, choice: int, output: Output, delta: Delta) -> None:
        assert self._group is not None
        if output.finish_reason == FINISH_ERROR:
            # What the engine refuses at the door is the request's fault, what breaks later is ours.
            status = 500 if choice in self._begun else 400
            raise ApiError(status, output.error or "the engine gave up on this request")
        if choice not in self._begun:
            self._begun.add(choice)
            if choice % self._each == 0:
                self.usage.cached_tokens += output.cached_tokens
        piece = self._texts[choice].feed(output)
        self.usage.completion_tokens += len(piece.tokens)
        delta.text += piece.text
        delta.offsets += piece.offsets
        delta.logprobs += piece.logprobs
        delta.prompt_logprobs = output.prompt_logprobs or delta.prompt_logprobs
        delta.finish_reason = piece.finish_reason
        if piece.finish_reason is not None:
            self._running.discard(choice)
            if output.finish_reason is None:  # a stop string: the engine does not know yet
                self._group.abort(output.request, FINISH_STOP)
