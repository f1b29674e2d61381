"""Plans each step and takes in its result. Owns queues, blocks and budgets; a policy only answers questions.

A request waits, runs as a sequence (a new number at each admission), and may be preempted: its blocks are freed and it
waits again, to be computed anew from all its tokens. What holds throughout:

- Steps run in the order planned; one may be under way while the next is planned, and results come in the same order.
  Hence a block can be handed on as soon as its owner is out of the plan, though a step under way still writes to it:
  its next owner writes later.
- A running sequence is first in its prompt, and gets chunks as the policy and the token budget allow. Then it decodes:
  it is in every step, with a token an iteration (`DecodeSet`), until all its tokens are planned.
- A decoding sequence always has a block for its next token, or is due. So planning looks only at those that are due,
  in their prompts or waiting, and taking in a result only appends tokens, until a sequence reaches its `milestone`.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import NamedTuple

import attrs

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.checked_policy import CheckedPolicy
from engine.core.schedulers.planner import Planner
from engine.core.schedulers.policy import SchedulingPolicy
from engine.core.schedulers.queues import Queues
from engine.core.schedulers.request_state import RequestState, max_output
from engine.core.schedulers.step_counter import StepCounter
from engine.core.schedulers.step_plan import Plan
from engine.core.types import (
    FINISH_ABORT,
    MAX_SEED,
    EngineStats,
    Output,
    PrefillChunk,
    Request,
    Step,
    StepResult,
    TokenLogprobs,
)


class _InFlight(NamedTuple):
    """A step whose result is not in yet, and whose its parts are: they may have ended since, or been preempted."""

    step: Step
    decodes: tuple[RequestState, ...]
    chunks: tuple[RequestState, ...]


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
        self._clock = StepCounter()
        self._queues = Queues(blocks, self._clock)
        self._planner = Planner(
            self._queues,
            CheckedPolicy(policy, self._queues.requests),
            self._clock,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
        )
        self._blocks = blocks
        self._max_running = max_running
        self._max_len = max_len
        self._eos_tokens = eos_tokens
        self._in_flight: deque[_InFlight] = deque()
        self._requests_added = 0
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
            prefix_queries=self._planner.prefix_queries,
            prefix_hits=self._planner.prefix_hits,
            preemptions=self._planner.preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps=self._clock.committed,
        )

    def add(self, request: Request) -> None:
        """Let a request wait for its turn. Raises InvalidRequestError when it can never run or its id is taken."""
        if request.id in self._queues.requests:
            raise InvalidRequestError(f"a request with id {request.id!r} is here already; choose another id", "id")
        block_size = self._blocks.block_size
        most = max_output(request, max_len=self._max_len, cache_tokens=self._blocks.num_blocks * block_size)
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
                block_size=block_size,
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
        if not self._queues.requests:
            return None
        plan = self._planner.plan(now, idle=not self._in_flight)
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

    def _emit(self, plan: Plan) -> Step:
        """Book the plan and put it into words for the runner."""
        queues, clock = self._queues, self._clock
        iterations = self._planner.iterations()
        numbers, decodes = queues.decoding.members()
        clock.planned += 1
        queues.decoding.advance(iterations)
        chunks = []
        for state, count in plan.chunks.items():
            start = state.computed
            sample = state.book_chunk(count)
            chunks.append(PrefillChunk(state.sequence, start, count, sample))
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
