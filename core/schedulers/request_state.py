"""What the scheduler knows of one request, and the read-only view of it that policies see."""

from __future__ import annotations

from attrs import frozen

from engine.core.errors import InvalidRequestError
from engine.core.schedulers.block_manager import HashChain
from engine.core.schedulers.step_counter import StepCounter
from engine.core.types import FINISH_LENGTH, FINISH_STOP, Output, Request, RequestTimes, SamplingParams, TokenLogprobs


class RequestState:
    """One request from its arrival to its end, over all its admissions.

    params: with the seed set. max_output: most tokens to generate. stop_tokens: those that end it. number: of requests
    added before it, which orders those that arrived at once.

    While it decodes it takes part in every step, so what it has computed and sampled follows from the clock; otherwise
    both are booked with each chunk.
    """

    __slots__ = (
        "_block_size",
        "_clock",
        "_computed",
        "_last_step",
        "_sampled",
        "_since",
        "cached_tokens",
        "capacity",
        "chain",
        "displaced",
        "due",
        "ended",
        "first_token_at",
        "id",
        "known",
        "max_output",
        "milestone",
        "order",
        "params",
        "preemptions",
        "prompt_len",
        "prompt_logprobs",
        "request",
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
        block_size: int,
        number: int,
        clock: StepCounter,
    ) -> None:
        self.request = request
        self.id = request.id
        self.params = params
        self.max_output = max_output
        self.stop_tokens = stop_tokens
        self.order = (request.arrival, number)
        self.prompt_len = len(request.prompt)
        self.tokens = list(request.prompt)  # the prompt and all output that has come back
        self.chain = HashChain(block_size, request.salt)
        self.view = StateView(request.id, request.priority, request.arrival, self.prompt_len, self)
        self.cached_tokens = 0  # at the first admission
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.preemptions = 0
        self.displaced = 0  # how often in a row for more urgent requests, without a token in between
        self.ended = False
        self._block_size = block_size
        self._clock = clock
        self._last_step = 0  # id of the last step with a part of it, those left out that the clock tells of
        self._sampled = 0  # as `sampled`, less what the clock tells
        # Of the present admission:
        self.sequence = 0  # its number; 0: it waits
        self.known = 0  # tokens known at admission, all to be computed before the first is sampled
        self.capacity = 0  # tokens that its blocks hold
        self._computed = 0  # as `computed`, less what the clock tells
        self._since = -1  # the tick at which its clock was started; -1: it stands
        self.due = -1  # the tick at which it needs attention, while its clock runs
        # `tokens` can grow by sampled ones to anything less than this length without that a block is full or the
        # request at its end; 0: it does not run.
        self.milestone = 0

    @property
    def _ticks(self) -> int:
        """Tokens that the clock tells of."""
        return self._clock.ticks - self._since if self._since >= 0 else 0

    @property
    def computed(self) -> int:
        """Tokens in the cache, or on their way there in a planned step."""
        return self._computed + self._ticks

    @property
    def sampled(self) -> int:
        """Tokens of output, those that planned steps will sample included."""
        return self._sampled + self._ticks

    @property
    def ends_at(self) -> int:
        """The tick at which all its tokens are planned; while its clock runs."""
        return self._since + self.max_output - self._sampled

    @property
    def full_at(self) -> int:
        """The tick at which its blocks are full; while its clock runs."""
        return self._since + self.capacity - self._computed

    @property
    def in_flight(self) -> bool:
        """Whether a step under way has a part of it."""
        return (self._clock.planned if self._ticks else self._last_step) > self._clock.committed

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
        self.capacity = capacity
        self._computed = cached
        self.prompt_logprobs.clear()

    def book_chunk(self, count: int) -> bool:
        """The step just planned computes `count` more of its known tokens; whether it samples the next."""
        self._computed += count
        self._last_step = self._clock.planned
        last = self._computed == self.known
        self._sampled += last
        return last

    def start_clock(self) -> None:
        """Take part in every step from now on."""
        self._since = self._clock.ticks

    def stop_clock(self) -> None:
        """Take part in no further step."""
        ticks = self._ticks
        if ticks:
            self._last_step = self._clock.planned
        self._computed += ticks
        self._sampled += ticks
        self._since = self.due = -1

    def leave(self) -> None:
        """Wait again, without blocks; its clock stands."""
        self.preemptions += 1
        self.sequence = 0
        self.capacity = 0
        self.milestone = 0
        self._computed = 0

    def end(self) -> None:
        """Results under way are of no interest any more."""
        self.ended = True
        self.milestone = 0

    def take(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now: float) -> Output:
        """Append sampled tokens up to the one that ends the request, and say what is new."""
        kept, reason = self._until_stop(tokens)
        prompt_logprobs = tuple(self.prompt_logprobs) if self.wants_prompt_logprobs else None
        self.tokens += kept
        if self.sequence:
            pages = (len(self.tokens) - 1) // self._block_size
            self.milestone = min(self.prompt_len + self.max_output, (pages + 1) * self._block_size + 1)
        self.displaced = 0
        if self.first_token_at is None:
            self.first_token_at = now
        return Output(
            request=self.id,
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


@frozen(eq=False, repr=False)
class StateView:
    """The read-only RequestView of one request, made once."""

    id: str
    """The request's own name."""
    priority: int
    """Lower is more urgent."""
    arrival: float
    """time.monotonic() seconds."""
    prompt_tokens: int
    """Length of the prompt."""
    _state: RequestState

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
