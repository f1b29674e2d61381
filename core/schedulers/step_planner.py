"""Plans a step: which requests decode, prefill, are admitted and are preempted."""

from __future__ import annotations

from collections.abc import Iterable

from engine.core.schedulers.admission import MAX_PREEMPTIONS_FOR_WAITING, Admission
from engine.core.schedulers.cache_metrics import CacheMetrics
from engine.core.schedulers.checked_policy import CheckedPolicy
from engine.core.schedulers.policy import MAX_DECODE_STEPS, Split
from engine.core.schedulers.queues import Queues
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_counter import StepCounter
from engine.core.schedulers.step_plan import StepPlan


class StepPlanner:
    """Asks the policy, and moves requests between waiting and running accordingly.

    max_batch_tokens: maximum tokens per step (per iteration of a multi-step step). max_running: maximum sequences per
    step. cache_metrics: counts the prompt tokens looked up in the prefix cache; None: they are not counted by tenant.
    """

    def __init__(
        self,
        queues: Queues,
        policy: CheckedPolicy,
        counter: StepCounter,
        *,
        max_batch_tokens: int,
        max_running: int,
        cache_metrics: CacheMetrics | None = None,
    ) -> None:
        self._queues = queues
        self._blocks = queues.blocks
        self._policy = policy
        self._counter = counter
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._admission = Admission(queues, policy, max_running=max_running)
        self._unrestricted = Split(decode=max_batch_tokens, prefill=max_batch_tokens)
        self._cache_metrics = cache_metrics
        self.prefix_queries = 0
        """Prompt tokens looked up in the prefix cache."""
        self.preemptions = 0
        """How often a request was preempted."""

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
            if plan.empty and idle:  # whatever the policy says, there must be progress
                plan = StepPlan(self._max_batch_tokens, self._unrestricted, queues.decoding, self._blocks)
                self._plan_decodes(plan)
                for state in list(queues.prefilling.values()):
                    if self._has_blocks(state, plan):
                        plan.add_chunk(state)
                if not queues.running:
                    self._admit(queues.waiting[:1], plan, now)
        except BaseException:  # of Ctrl-C while the policy runs
            plan.discard()
            raise
        return plan

    def iterations(self) -> int:
        """Number of iterations of the planned step: as many as the policy wants and outputs and blocks allow."""
        queues = self._queues
        if queues.prefilling or not self._policy.overrides_decode_steps:  # a multi-step step has no chunks
            return 1
        wanted = min(self._policy.decode_steps(queues.running_views, queues.waiting_views), MAX_DECODE_STEPS)
        count = 1
        while count < wanted:
            iteration = self._counter.iterations + count
            states = queues.decoding.events_at(iteration)
            if len(states) * self._blocks.blocks_per_extension > self._blocks.num_available:
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
        plan.extend_limited()

    def _add_chunks(self, plan: StepPlan, candidate: RequestState | None = None) -> None:
        """Add prefill chunks for running requests, deferring those the policy would preempt in favour of `candidate`.

        candidate: a waiting request. The deferred requests keep their blocks; only the candidate's chunk comes first.
        """
        if not plan.deferred:
            return
        deferred = []
        for state in tuple(plan.deferred):
            if state in plan.preempted:
                continue
            if (
                candidate is not None
                and state.preemptions_for_waiting < MAX_PREEMPTIONS_FOR_WAITING
                and self._policy.preempts(candidate.view, (state.view,)) is state
            ):
                deferred.append(state)
            else:
                self._add_chunk(state, plan)
        plan.deferred = [state for state in deferred if state not in plan.preempted]

    def _add_chunk(self, state: RequestState, plan: StepPlan) -> None:
        """Add a prefill chunk, which the policy may limit if the prompt is longer than a step and others wait."""
        queues, limit = self._queues, None
        if (
            self._policy.overrides_prefill_limit
            and state.prefill_len - state.computed > self._max_batch_tokens
            and plan.prefill_tokens_left > 0
            and (queues.waiting or len(queues.prefilling) > 1)
        ):
            prefilling = (other.view for other in queues.prefilling.values() if other is not state)
            others = (*prefilling, *queues.waiting_views)
            limit = self._policy.prefill_limit(state.view, plan.prefill_tokens_left, others)
        if self._has_blocks(state, plan):
            plan.add_chunk(state, limit)

    def _has_blocks(self, state: RequestState, plan: StepPlan) -> bool:
        """Give a prefilling request the blocks of its next chunk, preempting others or, if the policy says so,
        itself; False if it is preempted. Blocks are missing only if it shared those that are now behind its window."""
        if not self._blocks.slides or plan.prefill_tokens_left <= 0:
            return True
        if state in plan.preempted:
            return False
        while not self._blocks.slide(state.sequence, state.computed):
            victim = self._policy.victim(self._queues.running_views)
            self._preempt(victim, plan)
            if victim is state:
                return False
        return True

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
            place = self._admission.find(state, plan)
            if place is None:
                return
            with self._blocks.held(place.cached if place.victims else ()):
                for victim in place.victims:
                    victim.preemptions_for_waiting += 1
                    self._preempt(victim, plan)
                self._queues.admit(state, place.cached)
            if state.scheduled_at is None:
                state.scheduled_at = now
                if self._admission.uses_cache(state):
                    self.prefix_queries += state.prompt_len
                    if self._cache_metrics is not None:
                        self._cache_metrics.count_queries(state.request.salt, state.prompt_len)
            self._queues.move_to_prefill_end(plan.deferred)
            self._add_chunk(state, plan)
