"""Decides whether a waiting request can be admitted, and which running requests are preempted for it."""

from __future__ import annotations

from typing import NamedTuple

from engine.core.schedulers.checked_policy import CheckedPolicy
from engine.core.schedulers.queues import Queues
from engine.core.schedulers.request_state import RequestState, StateView
from engine.core.schedulers.shortage import Shortage
from engine.core.schedulers.step_plan import StepPlan

MAX_PREEMPTIONS_FOR_WAITING = 3
"""Times in a row that a request may be preempted for waiting ones before it has got a token; it is then exempt until it
has got one, so that there is progress under any policy."""
MAX_VIEWS_PER_STEP = 16384
"""Running requests shown to SchedulingPolicy.preempts in one step, over all its calls; at least one call is made. A
search that needs more goes on in the next step."""
MAX_DIGESTS_PER_STEP = 8192
"""Blocks of a prompt whose digests are computed in one step while others run, about 15 ms of work; a longer prompt is
admitted some steps later."""


class Place(NamedTuple):
    """Room for a waiting request.

    cached: indexed blocks of its prefix. victims: running requests to preempt first.
    """

    cached: list[int]
    victims: list[RequestState]


class _Search:
    """The search for room for one waiting request, kept so that the next step continues it.

    victims: the policy's choices so far, with their sequence numbers; preempted only once the request then fits.
    short: lower bound of the blocks missing even without the victims, counted when BlockManager.releases was
    `releases`; None: not counted. next_block: index of the request's first block that was not found in the prefix
    cache; None: all were.
    """

    __slots__ = ("candidates", "next_block", "num_new", "releases", "running", "short", "state", "victims")

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.victims: dict[RequestState, int] = {}
        self.short: int | None = None
        self.releases = 0
        self.next_block: int | None = None
        self.candidates: list[StateView] = []  # further requests that may be preempted
        self.running: tuple[StateView, ...] | None = None  # those running when `candidates` was made; None: outdated
        self.num_new = 0  # how many of `running` were admitted in the same step


class Admission:
    """Finds room for waiting requests, one at a time. max_running: maximum sequences per step.

    The blocks that the last request lacked are remembered. Until enough may have been released, its prefix is not
    looked up again, and the policy is only asked whether it would now preempt one more request.
    """

    def __init__(self, queues: Queues, policy: CheckedPolicy, *, max_running: int) -> None:
        self._queues = queues
        self._blocks = queues.blocks
        self._policy = policy
        self._max_running = max_running
        self._search: _Search | None = None

    def find(self, state: RequestState, plan: StepPlan) -> Place | None:
        """Find room for a waiting request; None: it must wait.

        It needs a place among max_running, and blocks for all its known tokens plus one for each other running request:
        a request that took the last blocks would be preempted a few steps later, its prefill wasted.
        """
        if not self._has_digests(state):
            return None
        search = self._search
        if search is None or search.state is not state:
            search = self._search = _Search(state)
        if self._policy.overrides_preempts:
            self._update(search, plan)
        cached: list[int] = []
        shortage: Shortage | None = None  # exact, once it is counted
        views_shown = 0
        while True:
            if shortage is None and self._may_fit(search):
                cached = self._lookup(search)
                if self.uses_cache(state) and self._blocks.awaits(state.tokens, state.chain, cached):
                    return None
                shortage = self._count(search, cached)
            if shortage is not None and self._fits(search, shortage.blocks):
                if any(plan.feeds_another(victim) for victim in search.victims):
                    return None
                self._search = None
                return Place(cached, list(search.victims))
            views = tuple(search.candidates)
            if not views or (views_shown and views_shown + len(views) > MAX_VIEWS_PER_STEP):
                return None
            victim = self._policy.preempts(state.view, views)
            if victim is None:
                return None
            views_shown += len(views)
            search.candidates.remove(victim.view)
            search.victims[victim] = victim.sequence
            assert search.short is not None
            if shortage is not None:
                shortage.release(victim.sequence)
                search.short = shortage.blocks
            else:
                search.short -= self._blocks.num_held(victim.sequence)

    def uses_cache(self, state: RequestState) -> bool:
        """Whether a request may begin with the blocks of others: prompt logprobs need the logits of every position."""
        return self._blocks.prefix_caching and not state.wants_prompt_logprobs

    def _has_digests(self, state: RequestState) -> bool:
        """Whether the digests of the request's blocks are computed; if not, compute as many as one step may."""
        missing = (len(state.tokens) - 1) // self._blocks.block_size - len(state.chain)
        if missing <= MAX_DIGESTS_PER_STEP or not self._queues.running or not self.uses_cache(state):
            return True
        state.chain.digest(state.tokens, len(state.chain) + MAX_DIGESTS_PER_STEP - 1)
        return False

    def _update(self, search: _Search, plan: StepPlan) -> None:
        """Bring the requests that may be preempted up to date."""
        queues = self._queues
        if search.running is queues.running_views and search.num_new == queues.num_new and not plan.chunks:
            return
        search.running, search.num_new = queues.running_views, queues.num_new
        search.victims = {
            victim: sequence for victim, sequence in search.victims.items() if queues.running.get(sequence) is victim
        }
        search.candidates.clear()
        for other in queues.admitted_earlier():
            if other.preemptions_for_waiting >= MAX_PREEMPTIONS_FOR_WAITING or plan.feeds_another(other):
                search.running = None  # the next step may preempt it
            elif other not in search.victims:
                search.candidates.append(other.view)

    def _lookup(self, search: _Search) -> list[int]:
        """Blocks of the request's longest indexed prefix."""
        search.next_block = None
        if not self.uses_cache(search.state):
            return []
        tokens = search.state.tokens
        cached = self._blocks.lookup(tokens, search.state.chain)
        search.next_block = self._blocks.next_block(tokens, cached)
        return cached

    def _count(self, search: _Search, cached: list[int]) -> Shortage:
        """Count the missing blocks, and forget the victims that are no longer needed."""
        shortage = self._blocks.shortage(len(search.state.tokens), cached)
        victims, search.victims = search.victims, {}
        for victim, sequence in victims.items():
            if self._fits(search, shortage.blocks):
                search.running = None  # the rest may be asked about again
                break
            shortage.release(sequence)
            search.victims[victim] = sequence
        search.short, search.releases = shortage.blocks, self._blocks.releases
        return shortage

    def _may_fit(self, search: _Search) -> bool:
        """Whether counting is worthwhile: False as long as the request certainly does not fit."""
        if search.short is None:
            return True
        state = search.state
        if search.next_block is not None and self._blocks.indexes(state.tokens, state.chain, search.next_block):
            return True
        return self._fits(search, search.short - (self._blocks.releases - search.releases))

    def _fits(self, search: _Search, short: int) -> bool:
        """Whether the request fits if `short` blocks are missing for its tokens once the victims are preempted."""
        others = len(self._queues.running) - len(search.victims)
        return others < self._max_running and short + others * self._blocks.blocks_per_extension <= 0
