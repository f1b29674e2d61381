"""Plans each step and takes in its result. Owns queues, blocks and budgets; a policy only answers questions.

A request waits, runs as a sequence (a new number at each admission), and may be preempted: its blocks are freed and it
waits again, to be computed anew from all its tokens. What holds throughout:

- Steps run in the order planned; one may be under way while the next is planned, and results come in the same order.
  Hence a block can be handed on as soon as its owner is out of the plan, though a step under way still writes to it:
  its next owner writes later.
- A running sequence is first in its prompt, and gets chunks as the policy and the token budget allow. Then it decodes:
  it is in every step, with a token an iteration (`Decoding`), until all its tokens are planned.
- A decoding sequence always has a block for its next token, or is due. So planning looks only at those that are due,
  in their prompts or waiting, and taking in a result only appends tokens, until a sequence reaches its `milestone`.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import attrs

from engine.core.clock import Clock
from engine.core.decoding import Decoding
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


class _InFlight(NamedTuple):
    """A step whose result is not in yet, and whose its parts are: they may have ended since, or been preempted."""

    step: Step
    decodes: tuple[RequestState, ...]
    chunks: tuple[RequestState, ...]


class _Plan:
    """The step in the making, beside its decodes: what is left of its tokens, and the chunks. Sequences are booked as
    advanced only once it is complete, so that a policy that fails half-way leaves nothing half done."""

    __slots__ = ("_decoding", "_prefill", "_total", "chunk_tokens", "chunks", "decode_room", "preempted", "yielding")

    def __init__(self, total: int, split: Split, decoding: Decoding) -> None:
        self._total = total
        self._prefill = split.prefill
        self._decoding = decoding
        self.decode_room = max(0, min(total, split.decode))
        self.chunks: dict[RequestState, int] = {}
        self.chunk_tokens = 0
        self.yielding: list[RequestState] = []  # in their prompts, served once the urgent ones that wait have been
        self.preempted: set[RequestState] = set()

    @property
    def empty(self) -> bool:
        return not (self._decoding or self.chunks)

    @property
    def prefill_room(self) -> int:
        """Tokens left for prompts."""
        return min(self._prefill, self._total - len(self._decoding)) - self.chunk_tokens

    def add_chunk(self, state: RequestState) -> None:
        """As many of the sequence's known tokens as there is room for."""
        count = min(self.prefill_room, state.known - state.computed)
        if count > 0:
            self.chunks[state] = count
            self.chunk_tokens += count

    def drop(self, state: RequestState) -> None:
        """Take a preempted sequence out."""
        self.preempted.add(state)
        self.chunk_tokens -= self.chunks.pop(state, 0)
        if state in self.yielding:
            self.yielding.remove(state)


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
        self._clock = Clock()
        self._queues = Queues(blocks, self._clock)
        self._policy = CheckedPolicy(policy, self._queues.requests)
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_len = max_len
        self._eos_tokens = eos_tokens
        self._everything = Split(decode=max_batch_tokens, prefill=max_batch_tokens)
        self._in_flight: deque[_InFlight] = deque()
        self._requests_added = 0
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
            steps=self._clock.committed,
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
                clock=self._clock,
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
        split = self._everything
        if self._policy.splits:
            split = self._policy.split(self._max_batch_tokens, queues.waiting_views, queues.running_views)
        plan = _Plan(self._max_batch_tokens, split, queues.decoding)
        self._plan_decodes(plan)
        self._plan_prompts(plan, now)
        if plan.empty and not self._in_flight:  # something must run, whatever the policy says
            plan = _Plan(self._max_batch_tokens, self._everything, queues.decoding)
            self._plan_decodes(plan)
            for state in queues.prefilling.values():
                plan.add_chunk(state)
            if not queues.running:
                self._admit(queues.waiting[:1], plan, now)
        return None if plan.empty else self._emit(plan)

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """Take in a step's result, in the order of the steps; what is new for each request comes back.

        Raises ExecutorError when the result does not belong to the step.
        """
        planned = self._expect(step, result)
        outputs: list[Output] = []
        columns = zip(zip(*result.tokens, strict=True), _logprob_columns(result), strict=False)
        milestones = 0
        # This loop is for every token there is: what can be done elsewhere is.
        for state, (tokens, logprobs) in zip(planned.decodes, columns, strict=False):
            known = state.tokens
            if len(known) + step.iterations < state.milestone and state.stop_tokens.isdisjoint(tokens):
                known += tokens
                outputs.append(
                    Output(request=state.id, tokens=tokens, logprobs=logprobs, cached_tokens=state.cached_tokens)
                )
            elif not state.ended:
                milestones += 1
                outputs.append(self._take(state, tokens, logprobs, now))
        self._generation_tokens += (len(outputs) - milestones) * step.iterations
        if step.chunks:
            self._commit_chunks(planned, columns, dict(result.prompt_logprobs), now, outputs)
        return outputs

    def check(self) -> None:
        """Raise AssertionError when the books disagree; for tests and for an idle engine."""
        self._queues.check()
        assert len(self._queues.running) <= self._max_running, "more run than may"
        under_way = {state for planned in self._in_flight for state in (*planned.decodes, *planned.chunks)}
        for state in self._queues.requests.values():
            assert state.in_flight == (state in under_way), "a result is awaited that never comes, or the reverse"

    def _plan_decodes(self, plan: _Plan) -> None:
        """Let those that are due leave or have a block, so that all that then decode can do so once more."""
        decoding = self._queues.decoding
        decoding.limit(plan.decode_room)
        tick = self._clock.ticks
        for state in decoding.due(tick):
            if state.due != tick:
                continue  # preempted a moment ago
            if state.ends_at == tick:
                decoding.leave(state)
            else:
                self._extend(state, plan)

    def _extend(self, state: RequestState, plan: _Plan) -> None:
        """One more block, taken from others if need be; the policy may have `state` itself preempted instead."""
        while not self._queues.extend(state):
            victim = self._policy.victim(self._queues.running_views)
            self._preempt(victim, plan)
            if victim is state:
                return

    def _plan_prompts(self, plan: _Plan, now: float) -> None:
        """Chunks for those in their prompts, and for waiting ones that can be admitted."""
        queues, policy = self._queues, self._policy
        seats = len(queues.running) < self._max_running or policy.displaces
        admitting = bool(queues.waiting) and seats and not plan.preempted
        plan.yielding = list(queues.prefilling.values())
        if not (admitting and policy.displaces):
            self._serve_prompts(plan)
        if admitting and plan.prefill_room > 0:
            self._admit(policy.order(queues.waiting_views, now), plan, now)
        self._serve_prompts(plan)

    def _serve_prompts(self, plan: _Plan, candidate: RequestState | None = None) -> None:
        """Chunks for those in their prompts, but for whom the policy would preempt for the waiting `candidate`: those
        need not go, but its prompt comes first."""
        staying = []
        for state in plan.yielding:
            if (
                candidate is not None
                and state.displaced < MAX_DISPLACED
                and self._policy.preempts(candidate.view, (state.view,)) is state
            ):
                staying.append(state)
            else:
                plan.add_chunk(state)
        plan.yielding = staying

    def _preempt(self, state: RequestState, plan: _Plan) -> None:
        plan.drop(state)
        self._queues.preempt(state)
        self._preemptions += 1

    def _admit(self, order: Iterable[RequestState], plan: _Plan, now: float) -> None:
        """Start waiting requests in this order, up to the first for which there is no room."""
        for state in order:
            if state in plan.preempted:
                continue
            self._serve_prompts(plan, state)
            if plan.prefill_room <= 0 or state.in_flight:
                return
            # Log probabilities of the whole prompt need the whole prompt computed.
            use_cache = self._blocks.prefix_caching and not state.wants_prompt_logprobs
            cached = self._blocks.lookup(state.tokens, state.chain) if use_cache else []
            if not self._fits(state, cached) and not self._displace(state, cached, plan):
                return
            self._queues.start(state, cached)
            self._queues.put_behind(plan.yielding)
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

    def _iterations(self) -> int:
        """How many times to repeat the step: as the policy wants, as far as outputs and blocks of all allow."""
        queues = self._queues
        if queues.prefilling or not self._policy.repeats:
            return 1
        wanted = self._policy.decode_steps(queues.running_views, queues.waiting_views)
        count = 1
        while count < wanted:
            tick = self._clock.ticks + count
            due = queues.decoding.due(tick)
            if len(due) > self._blocks.num_available or any(state.ends_at == tick for state in due):
                break
            for state in due:
                queues.extend(state)
            count += 1
        return count

    def _emit(self, plan: _Plan) -> Step:
        """Book the plan and put it into words for the runner."""
        queues, clock = self._queues, self._clock
        iterations = self._iterations()
        numbers, decodes = queues.decoding.members()
        clock.planned += 1
        queues.decoding.advance(iterations)
        chunks = []
        for state, count in plan.chunks.items():
            start = state.computed
            sample = state.book_chunk(count)
            chunks.append(Slice(state.sequence, start, count, sample))
            if sample:
                queues.prefilled(state)
        new, blocks, finished = queues.take_news()
        step = Step(
            id=clock.planned,
            decodes=numbers,
            chunks=tuple(chunks),
            iterations=iterations,
            new=new,
            blocks=blocks,
            finished=finished,
        )
        self._in_flight.append(_InFlight(step, decodes, tuple(plan.chunks)))
        return step

    def _expect(self, step: Step, result: StepResult) -> _InFlight:
        """Take the step from those under way, if it is its turn and the result has its shape."""
        if not self._in_flight or not step.id == result.step == self._in_flight[0].step.id:
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
        self._clock.committed = step.id
        return self._in_flight.popleft()

    def _commit_chunks(
        self,
        planned: _InFlight,
        columns: Iterator[tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]],
        scores: Mapping[int, tuple[TokenLogprobs, ...]],
        now: float,
        outputs: list[Output],
    ) -> None:
        """Take in what came of a step's chunks. columns: what those that sample sampled; scores: of prompts."""
        for state, piece in zip(planned.chunks, planned.step.chunks, strict=True):
            tokens, logprobs = next(columns) if piece.sample else ((), ())
            if state.ended:
                continue
            if piece.start < state.prompt_len:
                self._prompt_tokens += min(piece.count, state.prompt_len - piece.start)
                state.prompt_logprobs += scores.get(piece.sequence, ())
            if tokens:
                outputs.append(self._take(state, tokens, logprobs, now))
            elif state.sequence:
                self._blocks.register(state.sequence, state.tokens, state.chain, piece.start + piece.count)

    def _take(
        self, state: RequestState, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now: float
    ) -> Output:
        """Give a request its tokens, let others share the blocks that are full now, and see whether it has ended."""
        output = state.take(tokens, logprobs, now)
        self._generation_tokens += len(output.tokens)
        if state.sequence:  # the last token is not computed yet
            self._blocks.register(state.sequence, state.tokens, state.chain, len(state.tokens) - 1)
        if output.finish_reason is not None:
            self._queues.remove(state)
        return output


def _logprob_columns(result: StepResult) -> Iterator[tuple[TokenLogprobs, ...]]:
    """Log probabilities of each sequence that samples, one a token; empty where not asked for."""
    if not result.logprobs:
        return repeat(())
    return (tuple(entry for entry in column if entry is not None) for column in zip(*result.logprobs, strict=True))
