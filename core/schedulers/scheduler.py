"""Plans each step and commits its result. Owns queues, blocks and budgets; the policy only answers questions.

A request waits until it is admitted. It then runs as a sequence: it prefills, then decodes. When blocks run out it may
be preempted: its blocks are freed, it waits again, and at the next admission it gets a new sequence number and is
recomputed from all its tokens. It finishes by a stop token, at its maximum length, or when it is aborted.

Invariants:

- Steps execute in the order planned, and results are committed in that order. One step may be in flight while the next
  is planned.
- Hence a block may be reused as soon as its sequence is no longer part of the plan. A step in flight may still write to
  the block, but the new owner writes later, in a later step.
- A prefilling sequence is computed in chunks, as the policy and the token budget allow. The last chunk samples the
  next token, and from then on the sequence decodes.
- A decoding sequence is in every step and gains one token per iteration (`DecodeSet`), until all its output tokens are
  planned. It is left out only while the policy allows fewer decodes than there are.
- A decoding sequence has room in its blocks for the next token before each step that includes it. The iteration at
  which its blocks are full is known in advance, as its next event. So planning looks only at sequences with an event,
  prefilling ones and waiting ones, not at every decoding sequence.
- Drafts are planned when no step is in flight, and no step is planned while a step with drafts is in flight. Accepted
  drafts are tokens in addition to that of the iteration (`Drafting`); blocks of rejected drafts are freed, and no block
  with an unverified token is shared.
- Committing a result only appends tokens, until a token finishes the request (`finish_len`) or fills a block
  (`full_len`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.histogram import PREEMPTIONS_BOUNDS, STEP_TOKENS_BOUNDS, Histogram
from engine.core.profiling.live import StepMeter
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.cache_metrics import CacheMetrics
from engine.core.schedulers.checked_policy import CheckedPolicy
from engine.core.schedulers.drafting import Drafting
from engine.core.schedulers.no_token import no_token_error
from engine.core.schedulers.policy import SchedulingPolicy
from engine.core.schedulers.queues import Queues
from engine.core.schedulers.request_intake import RequestIntake
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.result_checks import check_result, logprob_columns
from engine.core.schedulers.step_counter import StepCounter
from engine.core.schedulers.step_plan import StepPlan
from engine.core.schedulers.step_planner import StepPlanner
from engine.core.speculators.checked_speculator import CheckedSpeculator
from engine.core.speculators.device_proposals import DeviceProposals
from engine.core.speculators.draft_lengths import DraftLengths
from engine.core.types import (
    FINISH_ABORT,
    FINISH_ERROR,
    NO_TOKEN,
    CacheStats,
    DraftSlice,
    EngineStats,
    Output,
    PrefillChunk,
    Request,
    Step,
    StepResult,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from engine.core.grammars.compiler import Grammars


class _InFlight(NamedTuple):
    """An in-flight step and the requests in it, which may have been preempted or finished since."""

    step: Step
    decodes: tuple[RequestState, ...]
    chunks: tuple[RequestState, ...]
    drafts: tuple[RequestState, ...]


class Scheduler:
    """Decides what each step computes.

    max_batch_tokens: maximum tokens per step (per iteration of a multi-step step). max_running: maximum sequences per
    step. max_len: maximum context, prompt and output together. eos_tokens: the model's end-of-sequence tokens. meter:
    counts what each planned step computes; None: nothing is counted. speculator: proposes drafts; None: there are none.
    draft_lengths: chooses how many drafts are verified; None: all are. grammars: compiles the grammars of requests,
    which drafts must match; None: drafts are not checked. unknown_sequences: sequences that the runner has but that
    belong to no request. not_built_in: Parts.not_built_in.
    """

    def __init__(
        self,
        policy: SchedulingPolicy[Any],
        blocks: BlockManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_len: int,
        eos_tokens: frozenset[int],
        cache_metrics: CacheMetrics | None = None,
        meter: StepMeter | None = None,
        speculator: CheckedSpeculator | DeviceProposals | None = None,
        draft_lengths: DraftLengths | None = None,
        grammars: Grammars | None = None,
        unknown_sequences: Iterable[int] = (),
        not_built_in: str = "",
    ) -> None:
        """cache_metrics: the metrics that observe `blocks`; None: the cache is not measured."""
        self._counter = StepCounter()
        self._meter = meter
        self._queues = Queues(blocks, self._counter, None if meter is None else meter.contexts)
        self._policy = CheckedPolicy(policy, self._queues.requests)
        self._planner = StepPlanner(
            self._queues,
            self._policy,
            self._counter,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            cache_metrics=cache_metrics,
        )
        self._drafting: Drafting | None = None
        if speculator is not None:
            self._drafting = Drafting(
                speculator, self._queues, draft_lengths, grammars, max_batch_tokens=max_batch_tokens
            )
        self._grammars = grammars
        self._not_built_in = not_built_in
        self._queues.forget(unknown_sequences)
        self._intake = RequestIntake(
            blocks,
            self._counter,
            max_len=max_len,
            eos_tokens=eos_tokens,
            speculates=speculator is not None,
        )
        self._blocks = blocks
        self._cache_metrics = cache_metrics
        self._max_running = max_running
        self._in_flight: deque[_InFlight] = deque()
        self._prefix_hits = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self._request_preemptions = Histogram(PREEMPTIONS_BOUNDS)

    @property
    def speculates(self) -> bool:
        """Whether steps may have drafts."""
        return self._drafting is not None

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._queues.requests)

    def requests(self) -> tuple[str, ...]:
        """Ids of all waiting and running requests."""
        return tuple(self._queues.requests)

    def stats(self) -> EngineStats:
        """Current counters and gauges; `seconds` is left to the engine."""
        return EngineStats(
            running=len(self._queues.running),
            waiting=len(self._queues.waiting),
            blocks_used=self._blocks.num_used,
            blocks_cached=self._blocks.num_cached,
            blocks_total=self._blocks.num_blocks,
            blocks_by_kind=self._blocks.usage_by_kind(),
            prefix_queries=self._planner.prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self._planner.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._counter.steps_committed,
            policy_faults=self._policy.faults,
            cache=self._cache_stats(self._cache_metrics) if self._cache_metrics is not None else None,
            step_tokens=self._step_tokens.snapshot(),
            request_preemptions=self._request_preemptions.snapshot(),
            speculation=self._drafting.stats() if self._drafting is not None else None,
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError if the request can never run or its id is in use."""
        if request.id in self._queues.requests:
            raise InvalidRequestError(f"request id {request.id!r} is already in use; choose another id", "id")
        self._queues.add(self._intake.make_state(request))

    def abort(self, request_id: str) -> Output | None:
        """Finish a waiting or running request and free its blocks; None if there is none with this id."""
        state = self._queues.requests.get(request_id)
        if state is None:
            return None
        self._retire(state)
        return Output(request=request_id, finish_reason=FINISH_ABORT, cached_tokens=state.cached_tokens)

    def request_states(self, sequences: Iterable[int] | None = None) -> list[RequestState]:
        """The requests of these running sequences; None: all waiting and running requests."""
        if sequences is None:
            return list(self._queues.requests.values())
        return [self._queues.running[sequence] for sequence in sequences if sequence in self._queues.running]

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache and return the number of blocks freed; running requests keep their own blocks."""
        return self._blocks.forget_prefixes()

    def schedule(self, now: float) -> Step | None:
        """Plan the next step; None if there is no work, or none before the result of a step in flight is committed."""
        if not self._queues.requests:
            return None
        if self._drafting is not None:
            return self._schedule_with_drafts(self._drafting, now)
        plan = self._planner.plan(now, idle=not self._in_flight)
        return None if plan.empty else self._build_step(plan)

    def _schedule_with_drafts(self, drafting: Drafting, now: float) -> Step | None:
        """`schedule`, with a speculator."""
        if self._in_flight and self._in_flight[-1].drafts:
            return None
        idle = not self._in_flight
        plan = self._planner.plan(now, idle=idle)
        if plan.empty:
            return None
        if idle:
            try:
                drafting.propose(plan)
            except BaseException:  # of Ctrl-C while the speculator runs
                plan.discard()
                raise
        return self._build_step(plan)

    def needs_result(self) -> bool:
        """Whether to commit the step in flight before planning the next one.

        True if the step in flight has or proposes drafts, since their requests cannot go on without its result, or if
        the next step may have drafts, which must follow the newest tokens.
        """
        if self._drafting is None or not self._in_flight:
            return False
        last = self._in_flight[-1]
        return bool(last.drafts or last.step.propose) or self._drafting.may_follow()

    def commit(self, step: Step, result: StepResult, now: float) -> list[Output]:
        """Append the tokens a step sampled, and return what is new for each request. Steps are committed in order.

        Raises ExecutorError when the result does not belong to the step.
        """
        planned = self._pop_in_flight(step, result)
        outputs: list[Output] = []
        columns = zip(zip(*result.tokens, strict=True), logprob_columns(result), strict=False)
        checked, iterations = 0, step.iterations
        tokens_computed = step.decode_rows + sum(chunk.count for chunk in step.chunks)
        self._step_tokens.observe(tokens_computed, iterations)
        # This loop runs for every token: whatever can be done elsewhere is done elsewhere.
        for state, (tokens, logprobs) in zip(planned.decodes, columns, strict=False):
            known = state.output
            length = len(known) + iterations
            if length < state.finish_len and state.stop_tokens.isdisjoint(tokens):
                known += tokens
                outputs.append(
                    Output(request=state.id, tokens=tokens, logprobs=logprobs, cached_tokens=state.cached_tokens)
                )
                if length >= state.full_len:
                    self._register(state)
            elif not state.finished:
                checked += 1
                outputs.append(self._append(state, tokens, logprobs, now))
        self._generation_tokens += (len(outputs) - checked) * iterations
        if step.chunks:
            self._commit_chunks(planned, columns, dict(result.prompt_logprobs), now, outputs)
        if step.drafts:
            self._commit_drafts(planned, result, now, outputs)
        if self._drafting is not None:
            sampling = (state for state, chunk in zip(planned.chunks, step.chunks, strict=True) if chunk.sample)
            self._drafting.receive((*planned.decodes, *sampling, *planned.drafts), result.proposals)
        return outputs

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated; for tests and for an idle engine."""
        self._queues.check()
        assert len(self._queues.running) <= self._max_running, "more than max_running requests run"
        in_flight = {state for planned in self._in_flight for part in planned[1:] for state in part}
        for state in self._queues.requests.values():
            assert state.in_flight == (state in in_flight), "a request is wrong about being in flight"

    def _cache_stats(self, metrics: CacheMetrics) -> CacheStats:
        blocks = self._blocks
        unfilled = sum(
            blocks.unfilled_slots(number, max(state.prefill_len, state.computed))
            for number, state in self._queues.running.items()
        )
        unreachable = sum(groups * blocks.count_cached(entries) for groups, entries in metrics.unreachable())
        return metrics.stats(
            unfilled_slots=unfilled,
            unreachable_slots=unreachable * blocks.block_size,
            total_slots=blocks.num_blocks * blocks.block_size,
        )

    def _build_step(self, plan: StepPlan) -> Step:
        """Commit the plan and build the Step."""
        queues, counter = self._queues, self._counter
        drafted: dict[int, RequestState] = {}
        slices: tuple[DraftSlice, ...] = ()
        positions: tuple[tuple[int, int], ...] = ()
        if self._drafting is not None:
            drafted, slices = self._drafting.take_slices()
        iterations = 1 if slices else self._planner.iterations()
        numbers, decodes = queues.decoding.members(excluding=drafted)
        if self._meter is not None:
            self._meter.count_decodes(counter.iterations, iterations)
        counter.steps_planned += 1
        queues.decoding.advance(iterations)
        chunks = []
        for state, chunk in plan.chunks.items():
            known = state.cached_tokens
            sample = state.plan_chunk(*chunk)
            if state.cached_tokens > known:
                self._prefix_hits += state.cached_tokens - known
                if self._cache_metrics is not None:
                    self._cache_metrics.count_hits(state.request.salt, state.cached_tokens - known)
            self._blocks.register(state.sequence, state.tokens, state.chain, chunk.start + chunk.num_tokens)
            chunks.append(PrefillChunk(state.sequence, *chunk, sample))
            if sample:
                queues.start_decoding(state)
        propose = 0
        if self._drafting is not None:
            propose = self._drafting.plan_proposals(
                plan, decodes, iterations, zip(drafted.values(), slices, strict=True)
            )
            positions = self._drafting.take_positions(drafted)
        new, blocks, finished = queues.take_runner_updates()
        step = Step(
            id=counter.steps_planned,
            decodes=numbers,
            chunks=tuple(chunks),
            iterations=iterations,
            drafts=slices,
            positions=positions,
            propose=propose,
            new=new,
            blocks=blocks,
            finished=finished,
        )
        if self._meter is not None:
            self._meter.submit(step)
        self._in_flight.append(_InFlight(step, decodes, tuple(plan.chunks), tuple(drafted.values())))
        return step

    def _pop_in_flight(self, step: Step, result: StepResult) -> _InFlight:
        """Remove and return the oldest step in flight, after checking that `result` belongs to it and has its shape."""
        if not self._in_flight or not step.id == result.step == self._in_flight[0].step.id:
            raise ExecutorError(f"the result of step {result.step} came out of order, for step {step.id}")
        check_result(step, result)
        self._counter.steps_committed = step.id
        return self._in_flight.popleft()

    def _commit_chunks(
        self,
        planned: _InFlight,
        columns: Iterator[tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]],
        prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]],
        now: float,
        outputs: list[Output],
    ) -> None:
        """Commit a step's prefill chunks, and append to `outputs`.

        columns: (tokens, logprobs) of each chunk that samples. prompt_logprobs: by sequence number.
        """
        for state, chunk in zip(planned.chunks, planned.step.chunks, strict=True):
            tokens, logprobs = next(columns) if chunk.sample else ((), ())
            if state.finished:
                continue
            if chunk.start < state.prompt_len:
                self._prompt_tokens += min(chunk.count, state.prompt_len - chunk.start)
                scored = prompt_logprobs.get(chunk.sequence, ())
                state.prompt_logprobs += scored
                if any(math.isnan(entry.logprob) for entry in scored):
                    tokens = (NO_TOKEN,)
            if tokens:
                outputs.append(self._append(state, tokens, logprobs, now))

    def _commit_drafts(self, planned: _InFlight, result: StepResult, now: float, outputs: list[Output]) -> None:
        """Commit a step's draft slices, and append to `outputs`."""
        assert self._drafting is not None, "drafts were planned without a speculator"
        self._drafting.accept(planned.drafts, planned.step.drafts, result.verified)
        logprobs = result.verified_logprobs or repeat(())
        for state, tokens, entries in zip(planned.drafts, result.verified, logprobs, strict=False):
            if state.finished:
                continue
            known = state.output
            length = len(known) + len(tokens)
            if length < state.finish_len and state.stop_tokens.isdisjoint(tokens):
                known += tokens
                self._generation_tokens += len(tokens)
                outputs.append(
                    Output(
                        request=state.id,
                        tokens=tokens,
                        logprobs=entries,
                        cached_tokens=state.cached_tokens,
                        prediction_tokens=state.prediction_tokens,
                    )
                )
                if length >= state.full_len:
                    self._register(state)
            else:
                outputs.append(self._append(state, tokens, entries, now))

    def _append(
        self, state: RequestState, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...], now: float
    ) -> Output:
        """Append tokens to a request, register blocks that are now full in the prefix cache, and retire if finished."""
        output = state.append(tokens, logprobs, now)
        self._generation_tokens += len(output.tokens)
        if output.finish_reason == FINISH_ERROR:
            self._blocks.unregister(state.tokens, state.chain)
            owner = "the grammar" if self._grammars is None else self._grammars.owner
            error = no_token_error(state, grammar_owner=owner, not_built_in=self._not_built_in)
            output = msgspec.structs.replace(output, error=error)
        elif state.sequence:
            self._register(state)
        if output.finish_reason is not None:
            self._retire(state)
        return output

    def _register(self, state: RequestState) -> None:
        """Register the blocks of a running request that are now full in the prefix cache."""
        # The last token is not computed yet.
        self._blocks.register(state.sequence, state.tokens, state.chain, state.last_position)
        state.note_full_blocks()

    def _retire(self, state: RequestState) -> None:
        """Remove a request that has finished, and free its blocks."""
        self._request_preemptions.observe(state.preemptions)
        self._queues.retire(state)
        if self._drafting is not None:
            self._drafting.forget(state)
