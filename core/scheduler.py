"""Plans each step and takes in its result. Owns queues, blocks and budgets; a policy only answers questions.

A request waits, runs as a sequence (a new number at each admission), and may be preempted: its blocks are freed and it
waits again, to be computed anew from all its tokens. Steps run in the order planned; one may be under way while the
next is planned, and results come in the same order. Hence a block can be handed on as soon as its owner is out of the
plan, though a step under way still writes to it: its next owner writes later.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

import attrs

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.kv_cache import BlockManager
from engine.core.policy import CheckedPolicy
from engine.core.queues import Queues
from engine.core.schedulers import SchedulingPolicy, Split
from engine.core.sequence import RequestState, max_output
from engine.core.types import (
    FINISH_ABORT,
    MAX_SEED,
    EngineStats,
    Output,
    Request,
    Slice,
    Step,
    StepResult,
    TokenLogprobs,
)

MAX_DISPLACED = 3
"""A request displaced so often in a row by waiting ones is then left alone until it has got a token, so that there is
progress under any policy."""


class _Plan:
    """The step in the making. Sequences are booked as advanced only once it is complete, so that a policy that fails
    half-way leaves nothing half done."""

    __slots__ = ("_prefill", "_total", "chunk_tokens", "chunks", "decode_room", "decodes", "preempted", "prefilling")

    def __init__(self, total: int, split: Split) -> None:
        self._total = total
        self._prefill = split.prefill
        self.decode_room = min(total, split.decode)
        self.decodes: list[RequestState] = []
        self.chunks: dict[RequestState, int] = {}
        self.chunk_tokens = 0
        self.prefilling = False  # whether any sequence is in its prompt, even without a chunk in this step
        self.preempted: set[RequestState] = set()

    @property
    def empty(self) -> bool:
        return not (self.decodes or self.chunks)

    @property
    def prefill_room(self) -> int:
        """Tokens left for prompts."""
        return min(self._prefill, self._total - len(self.decodes)) - self.chunk_tokens

    def add_chunk(self, state: RequestState) -> None:
        """As many of the sequence's known tokens as there is room for."""
        self.prefilling = True
        count = min(self.prefill_room, state.known - state.computed)
        if count > 0:
            self.chunks[state] = count
            self.chunk_tokens += count

    def drop(self, state: RequestState) -> None:
        """Take a preempted sequence out."""
        self.preempted.add(state)
        self.chunk_tokens -= self.chunks.pop(state, 0)
        if state in self.decodes:
            self.decodes.remove(state)


class Scheduler:
    """Decides what each step computes.

    max_batch_tokens: most tokens in one step (in one iteration of it). max_running: most sequences in one step.
    max_len: longest context, prompt and output together. eos_tokens: the model's own end-of-sequence tokens.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_len: int,
        eos_tokens: frozenset[int],
    ) -> None:
        self._queues = Queues(blocks)
        self._policy = CheckedPolicy(policy, self._queues.requests)
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_len = max_len
        self._eos_tokens = eos_tokens
        self._in_flight: deque[Step] = deque()
        self._decodes: tuple[int, ...] = ()  # of the last step
        self._requests_added = 0
        self._steps_planned = 0
        self._steps_committed = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._queues.requests)

    def requests(self) -> tuple[str, ...]:
        """Ids of all requests that wait or run."""
        return tuple(self._queues.requests)

    def stats(self) -> EngineStats:
        """Counters and gauges now; `seconds` is left to the engine."""
        return EngineStats(
            running=len(self._queues.running),
            waiting=len(self._queues.waiting),
            blocks_used=self._blocks.num_used,
            blocks_cached=self._blocks.num_cached,
            blocks_total=self._blocks.num_blocks,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._steps_committed,
        )

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. Raises InvalidRequestError when it can never run or its id is taken."""
        if request.id in self._queues.requests:
            raise InvalidRequestError(f"a request with id {request.id!r} is here already; choose another id", "id")
        page_size = self._blocks.page_size
        most = max_output(request, max_len=self._max_len, cache_tokens=self._blocks.num_blocks * page_size)
        params = request.params
        if params.seed is None:
            params = attrs.evolve(params, seed=secrets.randbelow(MAX_SEED))
        stop_tokens = self._eos_tokens if not params.ignore_eos else frozenset()
        if params.stop_token_ids:
            stop_tokens = stop_tokens.union(params.stop_token_ids)
        self._requests_added += 1
        self._queues.add(
            RequestState(
                request,
                params,
                max_output=most,
                stop_tokens=stop_tokens,
                page_size=page_size,
                number=self._requests_added,
            )
        )

    def abort(self, request_id: str) -> Output | None:
        """End a request in whatever state and free what it holds; None if there is none of that id."""
        state = self._queues.requests.get(request_id)
        if state is None:
            return None
        self._queues.remove(state)
        return Output(request=request_id, finish_reason=FINISH_ABORT, cached_tokens=state.cached_tokens)

    def schedule(self, now: float) -> Step | None:
        """The next step; None when there is none before a step under way is committed, or nothing to do at all.

        Raises PluginError when the policy fails or gives an impossible answer.
        """
        queues = self._queues
        if not queues.requests:
            return None
        total = self._max_batch_tokens
        plan = _Plan(total, self._policy.split(total, queues.waiting_views, queues.running_views))
        self._plan_running(plan)
        full = len(queues.running) >= self._max_running and not self._policy.displaces
        if queues.waiting and not full and plan.prefill_room > 0 and not plan.preempted:
            self._admit(self._policy.order(queues.waiting_views, now), plan, now)
        if plan.empty and not self._in_flight:  # something must run, whatever the policy says
            plan = _Plan(total, Split(decode=total, prefill=total))
            self._plan_running(plan)
            if not queues.running:
                self._admit(queues.waiting[:1], plan, now)
        return None if plan.empty else self._emit(plan)

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """Take in a step's result, in the order of the steps; what is new for each request comes back.

        Raises ExecutorError when the result does not belong to the step.
        """
        self._expect(step, result)
        self._steps_committed += 1
        scores = dict(result.prompt_logprobs)
        outputs = []
        rows = zip(zip(*result.tokens, strict=True), _columns(result), strict=False)
        for sequence in step.decodes:
            tokens, logprobs = next(rows)
            state = self._arrived(sequence)
            if state is not None:
                end = len(state.tokens) - 1 + step.iterations
                outputs.append(self._take(state, tokens, logprobs, now, end - step.iterations, end))
        for piece in step.chunks:
            tokens, logprobs = next(rows) if piece.sample else ((), ())
            state = self._arrived(piece.sequence)
            if state is None:
                continue
            if piece.start < state.prompt_len:
                self._prompt_tokens += min(piece.count, state.prompt_len - piece.start)
                state.prompt_logprobs += scores.get(piece.sequence, ())
            end = piece.start + piece.count
            if tokens:
                outputs.append(self._take(state, tokens, logprobs, now, piece.start, end))
            elif state.sequence:
                self._register(state, piece.start, end)
        return outputs

    def _arrived(self, sequence: int) -> RequestState | None:
        """Whose result this is, with one fewer under way; None: it ended while the step was."""
        state = self._queues.find(sequence)
        if state is not None:
            state.in_flight -= 1
            if not (state.sequence or state.in_flight):
                self._queues.drained(sequence)
        return state

    def _take(
        self,
        state: RequestState,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        now: float,
        start: int,
        end: int,
    ) -> Output:
        """Give a request its tokens, which came of computing positions `start` to `end`."""
        output = state.take(tokens, logprobs, now)
        self._generation_tokens += len(output.tokens)
        if state.sequence:
            self._register(state, start, end)
        if output.finish_reason:
            self._queues.remove(state)
        return output

    def check(self) -> None:
        """Raise AssertionError when the books disagree; for tests and for an idle engine."""
        self._queues.check()
        assert len(self._queues.running) <= self._max_running, "more run than may"
        if not self._in_flight:
            assert not any(state.in_flight for state in self._queues.requests.values()), "a result was missed"

    def _plan_running(self, plan: _Plan) -> None:
        """A token for each sequence that decodes, then chunks for those still in their prompts."""
        prefilling = []
        decodes = plan.decodes
        for state in list(self._queues.running.values()):
            if not state.sequence:
                continue  # preempted a moment ago
            if state.computed < state.known:
                prefilling.append(state)
            elif (
                state.sampled < state.max_output
                and len(decodes) < plan.decode_room
                and (state.computed < state.capacity or self._extend(state, plan))
            ):
                decodes.append(state)
        for state in prefilling:
            if state.sequence:
                plan.add_chunk(state)

    def _extend(self, state: RequestState, plan: _Plan) -> bool:
        """Room for one more token, taken from others if need be; False when the policy preempts `state` itself."""
        while not self._queues.extend(state, state.computed + 1):
            victim = self._policy.victim(self._queues.running_views)
            self._preempt(victim, plan)
            if victim is state:
                return False
        return True

    def _preempt(self, state: RequestState, plan: _Plan) -> None:
        plan.drop(state)
        self._queues.preempt(state)
        self._preemptions += 1

    def _admit(self, order: Iterable[RequestState], plan: _Plan, now: float) -> None:
        """Start waiting requests in this order, up to the first for which there is no room."""
        for state in order:
            if state in plan.preempted:
                continue
            if plan.prefill_room <= 0 or state.in_flight:
                return
            # Log probabilities of the whole prompt need the whole prompt computed.
            use_cache = self._blocks.prefix_caching and not state.wants_prompt_logprobs
            cached = self._blocks.lookup(state.tokens, state.chain) if use_cache else []
            if not self._fits(state, cached) and not self._displace(state, cached, plan):
                return
            self._queues.start(state, cached)
            plan.add_chunk(state)
            if state.scheduled_at is None:
                state.scheduled_at = now
                state.cached_tokens = state.computed
                self._prefix_queries += state.prompt_len if use_cache else 0
                self._prefix_hits += state.computed

    def _fits(self, state: RequestState, cached: Sequence[int], without: Sequence[RequestState] = ()) -> bool:
        """Whether there is a seat, and blocks for all its known tokens and one more for each running sequence.

        A request that takes the last blocks would be preempted a few steps later, its prompt computed in vain.
        """
        others = len(self._queues.running) - len(without)
        return others < self._max_running and self._blocks.can_allocate(
            len(state.tokens), cached, spare=others, without=[other.sequence for other in without]
        )

    def _displace(self, state: RequestState, cached: Sequence[int], plan: _Plan) -> bool:
        """Preempt running requests of the policy's choice for a waiting one; none unless it can then be admitted."""
        if not self._policy.displaces:
            return False
        running = [other for other in self._queues.settled() if other.displaced < MAX_DISPLACED]
        victims: list[RequestState] = []
        while not self._fits(state, cached, victims):
            if not running:
                return False
            victim = self._policy.preempts(state.view, tuple(other.view for other in running))
            if victim is None:
                return False
            running.remove(victim)
            victims.append(victim)
        for victim in victims:
            victim.displaced += 1
            self._preempt(victim, plan)
        return True

    def _iterations(self, plan: _Plan) -> int:
        """How many times to repeat the step: as the policy wants, as far as outputs and blocks of all allow."""
        if plan.prefilling:
            return 1
        wanted = self._policy.decode_steps(self._queues.running_views, self._queues.waiting_views)
        if wanted <= 1:
            return 1
        most = min(wanted, *(state.max_output - state.sampled for state in plan.decodes))
        page_size = self._blocks.page_size

        def missing(count: int) -> int:
            """Blocks for so many iterations, beside those that the sequences have."""
            return sum(max(0, -(-(state.computed + count - state.capacity) // page_size)) for state in plan.decodes)

        count = bisect_right(range(1, most + 1), self._blocks.num_available, key=missing)
        for state in plan.decodes:
            granted = self._queues.extend(state, state.computed + count)
            assert granted, "the blocks were counted"
        return count

    def _emit(self, plan: _Plan) -> Step:
        """Book the plan and put it into words for the runner."""
        iterations = self._iterations(plan)
        chunks = []
        decodes = tuple(state.sequence for state in plan.decodes)
        if decodes == self._decodes:
            decodes = self._decodes
        self._decodes = decodes
        for state in plan.decodes:
            state.computed += iterations
            state.sampled += iterations
            state.in_flight += 1
        for state, count in plan.chunks.items():
            last = state.computed + count == state.known
            chunks.append(Slice(state.sequence, state.computed, count, last))
            state.computed += count
            state.sampled += last
            state.in_flight += 1
        new, blocks, finished = self._queues.take_news()
        self._steps_planned += 1
        step = Step(
            id=self._steps_planned,
            decodes=decodes,
            chunks=tuple(chunks),
            iterations=iterations,
            new=new,
            blocks=blocks,
            finished=finished,
        )
        self._in_flight.append(step)
        return step

    def _expect(self, step: Step, result: StepResult) -> None:
        """Take the step from those under way, if it is its turn and the result has its shape."""
        if not self._in_flight or not step.id == result.step == self._in_flight[0].id:
            raise ExecutorError(
                f"the result of step {result.step} came out of turn, for step {step.id}; the executor is at fault"
            )
        columns = len(step.decodes) + sum(piece.sample for piece in step.chunks)
        for rows in (result.tokens, result.logprobs or result.tokens):
            if len(rows) != step.iterations or any(len(row) != columns for row in rows):
                raise ExecutorError(
                    f"the result of step {step.id} does not hold {step.iterations} rows of {columns} tokens; "
                    "the executor is at fault"
                )
        self._in_flight.popleft()

    def _register(self, state: RequestState, start: int, end: int) -> None:
        """Let others share the blocks that were filled by computing positions `start` to `end`."""
        end = min(end, len(state.tokens))  # beyond: tokens sampled past a stop
        if end // self._blocks.page_size > start // self._blocks.page_size:
            self._blocks.register(state.sequence, state.tokens, state.chain, end)


def _columns(result: StepResult) -> Iterator[tuple[TokenLogprobs, ...]]:
    """Log probabilities of each sequence that samples, one a token; empty where not asked for."""
    if not result.logprobs:
        return repeat(())
    return (tuple(entry for entry in column if entry is not None) for column in zip(*result.logprobs, strict=True))
