"""What the scheduler knows of one request, and the read-only view of it that policies see."""

from __future__ import annotations

from engine.core.errors import InvalidRequestError
from engine.core.kv_cache import HashChain
from engine.core.types import (
    FINISH_LENGTH,
    FINISH_STOP,
    Output,
    Request,
    RequestTimes,
    SamplingParams,
    TokenLogprobs,
)


class RequestState:
    """One request from its arrival to its end, over all its admissions.

    params: with the seed set. max_output: most tokens to generate. stop_tokens: those that end it. number: of requests
    added before it, which orders those that arrived at once.
    """

    __slots__ = (
        "cached_tokens",
        "capacity",
        "chain",
        "computed",
        "displaced",
        "first_token_at",
        "in_flight",
        "known",
        "max_output",
        "order",
        "params",
        "preemptions",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "sampled",
        "scheduled_at",
        "sequence",
        "stop_tokens",
        "tokens",
        "view",
    )

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        *,
        max_output: int,
        stop_tokens: frozenset[int],
        page_size: int,
        number: int,
    ) -> None:
        self.request = request
        self.params = params
        self.max_output = max_output
        self.stop_tokens = stop_tokens
        self.order = (request.arrival, number)
        self.prompt_len = len(request.prompt)
        self.tokens = list(request.prompt)  # the prompt and all output that has come back
        self.chain = HashChain(page_size, request.salt)
        self.view = StateView(self)
        self.cached_tokens = 0  # at the first admission
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.preemptions = 0
        self.displaced = 0  # how often in a row for more urgent requests, without a token in between
        self.in_flight = 0  # steps under way with a slice of it
        self.sampled = 0  # tokens of output, those that planned steps will sample included
        # Of the present admission:
        self.sequence = 0  # its number; 0: it waits
        self.known = 0  # tokens known at admission, all to be computed before the first is sampled
        self.computed = 0  # tokens in the cache, or on their way there in a planned step
        self.capacity = 0  # tokens that its blocks hold

    @property
    def output_len(self) -> int:
        """Tokens of output that have come back."""
        return len(self.tokens) - self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt are still to be delivered."""
        return self.params.prompt_logprobs is not None and not self.output_len

    def admit(self, sequence: int, cached: int, capacity: int) -> None:
        """Run as a new sequence, of which `cached` tokens are in the KV cache and whose blocks hold `capacity`."""
        self.sequence = sequence
        self.known = len(self.tokens)
        self.computed = cached
        self.capacity = capacity
        self.prompt_logprobs.clear()

    def leave(self) -> None:
        """Wait again, without blocks."""
        self.preemptions += 1
        self.sequence = 0
        self.computed = 0
        self.capacity = 0

    def take(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now: float) -> Output:
        """Append sampled tokens up to the one that ends the request, and say what is new."""
        kept, reason = self._until_stop(tokens)
        prompt_logprobs = tuple(self.prompt_logprobs) if self.wants_prompt_logprobs else None
        self.tokens += kept
        self.displaced = 0
        if self.first_token_at is None:
            self.first_token_at = now
        return Output(
            request=self.request.id,
            tokens=kept,
            logprobs=logprobs[: len(kept)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token=kept[-1] if reason == FINISH_STOP else None,
            cached_tokens=self.cached_tokens,
            times=self._times(now) if reason else None,
        )

    def _until_stop(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        """Those of the tokens that count, and why the last of them ends the request; None: it does not."""
        for index, token in enumerate(tokens, 1):
            count = self.output_len + index
            if token in self.stop_tokens and count >= self.params.min_tokens:
                return tokens[:index], FINISH_STOP
            if count == self.max_output:
                return tokens[:index], FINISH_LENGTH
        return tokens, None

    def _times(self, now: float) -> RequestTimes:
        assert self.scheduled_at is not None
        assert self.first_token_at is not None
        return RequestTimes(
            arrival=self.request.arrival,
            scheduled=self.scheduled_at,
            first_token=self.first_token_at,
            finished=now,
        )


class StateView:
    """The read-only RequestView of one request, made once."""

    __slots__ = ("_state",)

    def __init__(self, state: RequestState) -> None:
        self._state = state

    @property
    def id(self) -> str:
        """The request's own name."""
        return self._state.request.id

    @property
    def priority(self) -> int:
        """Lower is more urgent."""
        return self._state.request.priority

    @property
    def arrival(self) -> float:
        """time.monotonic() seconds."""
        return self._state.request.arrival

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self._state.prompt_len

    @property
    def computed_tokens(self) -> int:
        """Tokens in the KV cache, or on their way there in a step already planned."""
        return self._state.computed

    @property
    def output_tokens(self) -> int:
        """Tokens sampled, or being sampled in a step already planned."""
        return self._state.sampled

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""
        return self._state.preemptions

    def __repr__(self) -> str:
        return f"<request {self.id!r}>"


def state_of(view: object) -> RequestState | None:
    """The request behind a view that was handed out; None for anything else."""
    return view._state if isinstance(view, StateView) else None


def max_output(request: Request, *, max_len: int, cache_tokens: int) -> int:
    """Most tokens a request may generate, given the longest context and the tokens that fit into the KV cache.

    Raises InvalidRequestError when it can never run.
    """
    prompt, wanted, least = len(request.prompt), request.params.max_tokens, request.params.min_tokens
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    # The last token sampled is never computed, so it takes no place in the cache.
    longest = min(max_len, cache_tokens + 1)
    most = longest - prompt
    limit = f"{longest} tokens, " + ("the longest context" if longest == max_len else "all that the KV cache can hold")
    if most < 1:
        raise InvalidRequestError(
            f"a prompt of {prompt} tokens leaves no room for output within {limit}; shorten it", "prompt"
        )
    asked, name = (least, "min_tokens") if wanted is None else (wanted, "max_tokens")
    if asked > most:
        raise InvalidRequestError(
            f"a prompt of {prompt} tokens and {name} of {asked} exceed {limit}; use a {name} of at most {most}", name
        )
    return wanted or most
