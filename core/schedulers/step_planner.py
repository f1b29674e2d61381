"""Plans a step: which requests decode, prefill, are admitted and are preempted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.schedulers.checked_policy import CheckedPolicy
from engine.core.schedulers.policy import MAX_DECODE_STEPS, Split
from engine.core.schedulers.queues import Queues
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_counter import StepCounter
from engine.core.schedulers.step_plan import StepPlan

MAX_PREEMPTIONS_FOR_WAITING = 3
"""Times in a row that a request may be preempted for waiting ones before it has got a token; it is then exempt until it
has got one, so that there is progress under any policy."""


class StepPlanner:
    """Asks the policy, and moves requests between waiting and running accordingly.

    max_batch_tokens: maximum tokens per step (per iteration of a multi-step step). max_running: maximum sequences per
    step.
    """

    def __init__(
        self, queues: Queues, policy: CheckedPolicy, counter: StepCounter, *, max_batch_tokens: int, max_running: int
    ) -> None:
        self._queues = queues
        self._blocks = queues.blocks
        self._policy = policy
        self._counter = counter
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._unrestricted = Split(decode=max_batch_tokens, prefill=max_batch_tokens)
        self.prefix_queries = 0
        self.preemptions = 0

    def plan(self, now: float, *, idle: bool) -> StepPlan:
        """The next step's plan; never empty if `idle` (no step is in flight) and there is a request."""
        queues = self._queues
        split = self._unrestricted
        if self._policy.overrides_split:
            split = self._policy.split(self._max_batch_tokens, queues.waiting_views, queues.running_views)
        plan = StepPlan(self._max_batch_tokens, split, queues.decoding, self._blocks)
        try:
            self._plan_decodes(plan)
            self._plan_prefills(plan, now)
        except BaseException:
            plan.discard()
            raise
        if plan.empty and idle:  # whatever the policy says, there must be progress
            plan = StepPlan(self._max_batch_tokens, self._unrestricted, queues.decoding, self._blocks)
            self._plan_decodes(plan)
            for state in queues.prefilling.values():
                plan.add_chunk(state)
            if not queues.running:
                self._admit(queues.waiting[:1], plan, now)
        return plan

    def iterations(self) -> int:
        """Number of iterations of the planned step: as many as the policy wants, and outputs and blocks allow."""
        queues = self._queues
        if queues.prefilling or not self._policy.overrides_decode_steps:  # a multi-step step has no chunks
            return 1
        wanted = min(self._policy.decode_steps(queues.running_views, queues.waiting_views), MAX_DECODE_STEPS)
        count = 1
        while count < wanted:
            iteration = self._counter.iterations + count
            states = queues.decoding.events_at(iteration)
            if len(states) > self._blocks.num_available:
                break
            if any(state.output_planned_at == iteration for state in states):
                break
            for state in states:
                queues.add_block(state)
            count += 1
        return count

    def _plan_decodes(self, plan: StepPlan) -> None:
        """Drop sequences whose output is all planned; give another block to those whose blocks are full."""
        decoding = self._queues.decoding
        iteration = self._counter.iterations
        for state in decoding.events_at(iteration):
            if state.output_planned_at == iteration:
                decoding.remove(state)
        decoding.limit(plan.max_decodes)
        while states := decoding.events_at(iteration):
            for state in states:
                if state.next_event == iteration:  # else preempted by an earlier pass of this loop
                    self._add_block(state, plan)
            decoding.limit(plan.max_decodes)  # a preemption may let a deferred sequence become active

    def _add_block(self, state: RequestState, plan: StepPlan) -> None:
        """Give a decoding request one more block, preempting others (or, if the policy says so, itself) if need be."""
        while not self._queues.add_block(state):
            victim = self._policy.victim(self._queues.running_views)
            self._preempt(victim, plan)
            if victim is state:
                return

    def _plan_prefills(self, plan: StepPlan, now: float) -> None:
        """Add chunks for prefilling requests, and admit waiting ones."""
        queues, policy = self._queues, self._policy
        may_fit = len(queues.running) < self._max_running or policy.overrides_preempts
        admitting = bool(queues.waiting) and may_fit and not plan.preempted
        plan.deferred = list(queues.prefilling.values())
        if not (admitting and policy.overrides_preempts):
            self._add_chunks(plan)
        if admitting and plan.prefill_tokens_left > 0:
            self._admit(policy.order(queues.waiting_views, now), plan, now)
        self._add_chunks(plan)

    def _add_chunks(self, plan: StepPlan, candidate: RequestState | None = None) -> None:
        """Add prefill chunks for running requests, deferring those the policy would preempt in favour of `candidate`.

        candidate: a waiting request. The deferred requests keep their blocks; only the candidate's chunk comes first.
        """
        deferred = []
        for state in plan.deferred:
            if (
                candidate is not None
                and state.preemptions_for_waiting < MAX_PREEMPTIONS_FOR_WAITING
                and self._policy.preempts(candidate.view, (state.view,)) is state
            ):
                deferred.append(state)
            else:
                plan.add_chunk(state)
        plan.deferred = deferred

    def _preempt(self, state: RequestState, plan: StepPlan) -> None:
        plan.remove(state)
        self._queues.preempt(state)
        self.preemptions += 1

    def _admit(self, order: Iterable[RequestState], plan: StepPlan, now: float) -> None:
        """Admit waiting requests in this order, up to the first that does not fit."""
        for state in order:
            if state in plan.preempted:
                continue
            self._add_chunks(plan, state)
            if plan.prefill_tokens_left <= 0 or state.in_flight:
                return
            # Prompt logprobs need the logits of every prompt position, which the prefix cache does not have.
            use_cache = self._blocks.prefix_caching and not state.wants_prompt_logprobs
            cached = self._blocks.lookup(state.tokens, state.chain) if use_cache else []
            victims = [] if self._fits(state, cached) else self._victims_for(state, cached, plan)
            if victims is None:
                return
            with self._blocks.held(cached if victims else ()):
                for victim in victims:
                    victim.preemptions_for_waiting += 1
                    self._preempt(victim, plan)
                self._queues.admit(state, cached)
            self._queues.move_to_prefill_end(plan.deferred)
            plan.add_chunk(state)
            if state.scheduled_at is None:
                state.scheduled_at = now
                self.prefix_queries += state.prompt_len if use_cache else 0

    def _fits(self, state: RequestState, cached: Sequence[int], without: Sequence[RequestState] = ()) -> bool:
        """Whether a request could be admitted once the requests `without` are preempted.

        It needs a place among max_running, and blocks for all its known tokens plus one for each other running request:
        a request that took the last blocks would be preempted a few steps later, its prefill wasted.
        """
        others = len(self._queues.running) - len(without)
        return others < self._max_running and self._blocks.can_allocate(
            len(state.tokens), cached, spare=others, without=[other.sequence for other in without]
        )

    def _victims_for(self, state: RequestState, cached: Sequence[int], plan: StepPlan) -> list[RequestState] | None:
        """The running requests of the policy's choice to preempt for a waiting one; None if it would still not fit."""
        if not self._policy.overrides_preempts:
            return None
        running = [
            other
            for other in self._queues.admitted_earlier()
            if other.preemptions_for_waiting < MAX_PREEMPTIONS_FOR_WAITING and not plan.feeds_another(other)
        ]
        victims: list[RequestState] = []
        while not self._fits(state, cached, victims):
            if not running:
                return None
            victim = self._policy.preempts(state.view, tuple(other.view for other in running))
            if victim is None:
                return None
            running.remove(victim)
            victims.append(victim)
        return victims
