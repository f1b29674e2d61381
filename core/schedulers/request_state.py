"""The scheduler's state of one request, and the read-only view of it that policies see."""

from __future__ import annotations

from attrs import frozen

from engine.core.schedulers.growing_tokens import GrowingTokens
from engine.core.schedulers.hash_chain import HashChain
from engine.core.schedulers.step_counter import StepCounter
from engine.core.types import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    NO_TOKEN,
    FinishReason,
    Output,
    Request,
    RequestTimes,
    SamplingParams,
    TokenLogprobs,
)


class RequestState:
    """One request from arrival to finish, across all its admissions.

    params: with the seed set. max_output: maximum tokens to generate. stop_tokens: tokens that finish the request;
    NO_TOKEN is always one. chain: for the request's salt.
    number: serial number of the request, which orders requests of equal arrival time.

    While a request decodes it is in every step, so the numbers of tokens computed and sampled follow from the step
    counter and the accepted drafts; otherwise both are updated with each planned chunk.
    """

    __slots__ = (
        "_block_size",
        "_computed",
        "_counter",
        "_decoding_since",
        "_last_step",
        "_sampled",
        "arrival_order",
        "cached_tokens",
        "capacity",
        "chain",
        "finish_len",
        "finished",
        "first_token_at",
        "full_len",
        "id",
        "max_output",
        "next_event",
        "output",
        "params",
        "prediction_tokens",
        "preemptions",
        "preemptions_for_waiting",
        "prefill_len",
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
        chain: HashChain,
        number: int,
        counter: StepCounter,
    ) -> None:
        self.request = request
        self.id = request.id
        self.params = params
        self.max_output = max_output
        self.stop_tokens = stop_tokens | {NO_TOKEN}
        self.arrival_order = (request.arrival, number)
        self.prompt_len = len(request.prompt)
        self.tokens = GrowingTokens(request.prompt)  # the prompt and all committed output
        self.output = self.tokens.tail  # all committed output
        self.chain = chain
        self.view = StateView(request.id, request.priority, request.arrival, self.prompt_len, self)
        self.cached_tokens = 0  # in the first admission
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prediction_tokens = (0, 0) if request.prediction else None  # Output.prediction_tokens
        self.preemptions = 0
        self.preemptions_for_waiting = 0  # preemptions in favour of waiting requests since the last token
        self.finished = False
        self._block_size = block_size
        self._counter = counter
        self._last_step = 0  # id of the last step that includes the request, not updated while it decodes
        self._sampled = 0  # as `sampled`, less `_decoded`
        # Of the current admission:
        self.sequence = 0  # sequence number; 0: waiting
        self.prefill_len = 0  # tokens known at admission, all to be computed before the next one is sampled
        self.capacity = 0  # tokens that the sequence's blocks hold
        self._computed = 0  # as `computed`, less `_decoded`
        self._decoding_since = -1  # iteration at which decoding started; -1: it does not decode
        self.next_event = -1  # while it decodes: the iteration before which it needs a block, or stops decoding
        # Length of `output` at which the request finishes, if no stop token comes before: until then a commit only
        # appends tokens. 0: not running, or no token committed in this admission.
        self.finish_len = 0
        self.full_len = 0  # length of `output` at which the next block is full, once a token was committed

    @property
    def _decoded(self) -> int:
        """Tokens computed, and as many sampled, in the iterations since decoding started; without accepted drafts."""
        return self._counter.iterations - self._decoding_since if self._decoding_since >= 0 else 0

    @property
    def computed(self) -> int:
        """Tokens in the KV cache, including those that planned steps will compute."""
        return self._computed + self._decoded

    @property
    def sampled(self) -> int:
        """Output tokens, including those that planned steps will sample."""
        return self._sampled + self._decoded

    @property
    def output_planned_at(self) -> int:
        """The iteration by which all output tokens are planned; only while decoding."""
        return self._decoding_since + self.max_output - self._sampled

    @property
    def blocks_full_at(self) -> int:
        """The iteration at which the sequence's blocks are full; only while decoding."""
        return self._decoding_since + self.capacity - self._computed

    @property
    def context_offset(self) -> int:
        """Tokens computed before an iteration, minus the iteration's number; only while decoding. Only accepted drafts
        change it."""
        return self._computed - self._decoding_since

    @property
    def in_flight(self) -> bool:
        """Whether a step in flight includes this request."""
        return (self._counter.steps_planned if self._decoded else self._last_step) > self._counter.steps_committed

    @property
    def last_position(self) -> int:
        """Position of the last token committed; while the request decodes and is not in flight, the next to compute."""
        return self.prompt_len + len(self.output) - 1

    @property
    def output_len(self) -> int:
        """Output tokens committed."""
        return len(self.output)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs were requested and have not been returned yet."""
        return self.params.prompt_logprobs is not None and not self.output_len

    def admit(self, sequence: int, capacity: int) -> None:
        """Start running under a new sequence number. capacity: tokens that the sequence's blocks hold."""
        self.sequence = sequence
        self.prefill_len = len(self.tokens)
        self.capacity = capacity
        self._computed = 0
        self.prompt_logprobs.clear()

    def plan_chunk(self, start: int, count: int) -> bool:
        """Count a prefill chunk of the step just planned; returns whether the chunk samples the next token.

        The tokens that the chunk skips are in blocks shared with sequences that have computed them.
        """
        if not self.preemptions:
            self.cached_tokens += start - self._computed
        self._computed = start + count
        self._last_step = self._counter.steps_planned
        last = self._computed == self.prefill_len
        self._sampled += last
        return last

    def count_prediction(self, tokens: tuple[int, ...], verified: int) -> None:
        """Count drafts from the prediction. tokens: the accepted drafts and the token after them, not yet appended."""
        assert self.prediction_tokens is not None, "the request has no prediction"
        accepted, rejected = self.prediction_tokens
        kept = min(len(tokens) - 1, len(self._until_stop(tokens)[0]))
        self.prediction_tokens = (accepted + kept, rejected + verified - kept)

    def find_next_event(self) -> int:
        """Update `next_event` for the sequence's blocks, and return it; only while decoding."""
        iterations_left = min(self.max_output - self._sampled, self.capacity - self._computed)
        self.next_event = self._decoding_since + iterations_left
        return self.next_event

    def accept_drafts(self, count: int) -> int:
        """Count accepted drafts: tokens gained in addition to the one per iteration, while decoding. Returns
        `next_event`, which comes as many iterations earlier."""
        self._computed += count
        self._sampled += count
        self.next_event -= count
        return self.next_event

    def start_decoding(self) -> None:
        """Take part in every step from now on."""
        self._decoding_since = self._counter.iterations

    def stop_decoding(self) -> None:
        """Take part in no further step."""
        decoded = self._decoded
        if decoded:
            self._last_step = self._counter.steps_planned
        self._computed += decoded
        self._sampled += decoded
        self._decoding_since = self.next_event = -1

    def preempt(self) -> None:
        """Go back to waiting, without blocks; decoding must have stopped."""
        self.preemptions += 1
        self.sequence = 0
        self.capacity = 0
        self.finish_len = 0
        self._computed = 0

    def finish(self) -> None:
        """Mark as finished: results still in flight are ignored."""
        self.finished = True
        self.finish_len = 0

    def append(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now: float) -> Output:
        """Append sampled tokens up to the one that finishes the request, and return them as an Output.

        Where no token could be sampled, `error` is yet to be set: no_token_error.
        """
        kept, reason = self._until_stop(tokens)
        prompt_logprobs = tuple(self.prompt_logprobs) if self.wants_prompt_logprobs and reason != FINISH_ERROR else None
        self.output += kept
        if self.sequence:
            self.finish_len = self.max_output
        self.preemptions_for_waiting = 0
        first = self.first_token_at is None
        if first:
            self.first_token_at = now
        return Output(
            request=self.id,
            tokens=kept,
            logprobs=logprobs[: len(kept)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token=kept[-1] if reason == FINISH_STOP else None,
            cached_tokens=self.cached_tokens,
            times=self._times(now) if first or reason else None,
            num_tokens=len(self.output) if reason else 0,
            preemptions=self.preemptions if reason else 0,
            prediction_tokens=self.prediction_tokens,
        )

    def note_full_blocks(self) -> None:
        """Update `full_len` after tokens were committed."""
        full_blocks = self.last_position // self._block_size
        self.full_len = (full_blocks + 1) * self._block_size + 1 - self.prompt_len

    def _until_stop(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The tokens up to the one that finishes the request, and the finish reason; None if it goes on."""
        known = len(self.output)
        if known + len(tokens) < self.max_output and self.stop_tokens.isdisjoint(tokens):
            return tokens, None
        for count, (index, token) in enumerate(enumerate(tokens, 1), known + 1):
            if token == NO_TOKEN:
                return tokens[: index - 1], FINISH_ERROR
            if token in self.stop_tokens and (count >= self.params.min_tokens or self.params.grammar is not None):
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
    """The read-only RequestView of one request; one object for the life of the request."""

    id: str
    """Id of the request."""
    priority: int
    """Lower is more urgent."""
    arrival: float
    """Arrival time: time.monotonic(), seconds."""
    prompt_tokens: int
    """Length of the prompt, in tokens."""
    _state: RequestState

    @property
    def tenant(self) -> str | None:
        """The request's cache_salt; None: the tenant of all requests without one."""
        return self._state.request.salt or None

    @property
    def computed_tokens(self) -> int:
        """Tokens in the KV cache, including those that planned steps will compute."""
        return self._state.computed

    @property
    def output_tokens(self) -> int:
        """Tokens sampled, including those that planned steps will sample."""
        return self._state.sampled

    @property
    def preemptions(self) -> int:
        """How often the request was preempted."""
        return self._state.preemptions

    def __repr__(self) -> str:
        return f"<request {self.id!r}>"


def state_of(view: object) -> RequestState | None:
    """The request behind a StateView; None for any other object."""
    return view._state if isinstance(view, StateView) else None
