"""Fills a step: who decodes on, whose prompt comes next, who is admitted and who has to give way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.schedulers.checked_policy import CheckedPolicy
from engine.core.schedulers.policy import MAX_DECODE_STEPS, Split
from engine.core.schedulers.queues import Queues
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_counter import StepCounter
from engine.core.schedulers.step_plan import Plan

MAX_DISPLACED = 3
"""A request displaced so often in a row by waiting ones is then left alone until it has got a token, so that there is
progress under any policy."""


class Planner:
    """Asks the policy, and moves requests between waiting and running accordingly.

    max_batch_tokens: most tokens in one step (in one iteration of it). max_running: most sequences in one step.
    """

    def __init__(
        self, queues: Queues, policy: CheckedPolicy, clock: StepCounter, *, max_batch_tokens: int, max_running: int
    ) -> None:
        self._queues = queues
        self._blocks = queues.blocks
        self._policy = policy
        self._clock = clock
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._everything = Split(decode=max_batch_tokens, prefill=max_batch_tokens)
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0

    def plan(self, now: float, *, idle: bool) -> Plan:
        """What the next step computes; never nothing if a request is there and the engine is idle."""
        queues = self._queues
        split = self._everything
        if self._policy.splits:
            split = self._policy.split(self._max_batch_tokens, queues.waiting_views, queues.running_views)
        plan = Plan(self._max_batch_tokens, split, queues.decoding)
        self._plan_decodes(plan)
        self._plan_prompts(plan, now)
        if plan.empty and idle:  # something must run, whatever the policy says
            plan = Plan(self._max_batch_tokens, self._everything, queues.decoding)
            self._plan_decodes(plan)
            for state in queues.prefilling.values():
                plan.add_chunk(state)
            if not queues.running:
                self._admit(queues.waiting[:1], plan, now)
        return plan

    def iterations(self) -> int:
        """How many times to repeat the step: as the policy wants, as far as outputs and blocks of all allow."""
        queues = self._queues
        if queues.prefilling or not self._policy.repeats:
            return 1
        wanted = min(self._policy.decode_steps(queues.running_views, queues.waiting_views), MAX_DECODE_STEPS)
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

    def _plan_decodes(self, plan: Plan) -> None:
        """Let those that are due leave or have a block, so that all that then decode can do so once more."""
        decoding = self._queues.decoding
        tick = self._clock.ticks
        for state in decoding.due(tick):
            if state.ends_at == tick:
                decoding.leave(state)
        decoding.limit(plan.decode_room)
        while due := decoding.due(tick):
            for state in due:
                if state.due == tick:  # not preempted a moment ago
                    self._extend(state, plan)
            decoding.limit(plan.decode_room)  # who was preempted leaves room for one held back

    def _extend(self, state: RequestState, plan: Plan) -> None:
        """One more block, taken from others if need be; the policy may have `state` itself preempted instead."""
        while not self._queues.extend(state):
            victim = self._policy.victim(self._queues.running_views)
            self._preempt(victim, plan)
            if victim is state:
                return

    def _plan_prompts(self, plan: Plan, now: float) -> None:
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

    def _serve_prompts(self, plan: Plan, candidate: RequestState | None = None) -> None:
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

    def _preempt(self, state: RequestState, plan: Plan) -> None:
        plan.drop(state)
        self._queues.preempt(state)
        self.preemptions += 1

    def _admit(self, order: Iterable[RequestState], plan: Plan, now: float) -> None:
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
                self.prefix_queries += state.prompt_len if use_cache else 0
                self.prefix_hits += state.computed

    def _fits(self, state: RequestState, cached: Sequence[int], without: Sequence[RequestState] = ()) -> bool:
        """Whether there is a seat, and blocks for all its known tokens and one more for each running sequence.

        A request that takes the last blocks would be preempted a few steps later, its prompt computed in vain.
        """
        others = len(self._queues.running) - len(without)
        return others < self._max_running and self._blocks.can_allocate(
            len(state.tokens), cached, spare=others, without=[other.sequence for other in without]
        )

    def _displace(self, state: RequestState, cached: Sequence[int], plan: Plan) -> bool:
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
