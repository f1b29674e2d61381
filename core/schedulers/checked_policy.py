"""Calls a scheduling policy and validates its answers; where it fails, first come, first served decides."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from engine.core.plugin_host.counted_faults import CountedFaults, InvalidAnswerError
from engine.core.plugin_host.installed import OBJECT, describe_plugin
from engine.core.schedulers.policy import SchedulingPolicy, Split
from engine.core.schedulers.request_state import RequestState, StateView, state_of

_log = logging.getLogger(__name__)


class CheckedPolicy:
    """A policy whose answers are valid: they name only requests that it was shown.

    A policy that raises, or gives an invalid answer, cannot stop the engine: the decision is made first come, first
    served, the fault is counted in `faults`, and the first fault of each method is logged. The policy is asked again
    for the next decision.

    `requests`: all requests of the scheduler, by id.

    overrides_preempts, overrides_split, overrides_prefill_limit, overrides_decode_steps: whether the policy
    overrides the method; if not, the scheduler need not call it, nor build the views it would be shown.
    """

    def __init__(self, policy: SchedulingPolicy[Any], requests: Mapping[str, RequestState]) -> None:
        self._policy = policy
        self._requests = requests
        cls = type(policy)
        named = describe_plugin("scheduler", cls.__qualname__, OBJECT)
        owner: str = getattr(cls, "plugin_owner", named)  # an instance passed in from Python has a plain class
        instead = "first come, first served decides"
        self._faults = CountedFaults(owner, _log, instead=instead, metric="engine_policy_faults_total")
        self.overrides_preempts = cls.preempts is not SchedulingPolicy.preempts
        self.overrides_split = cls.split is not SchedulingPolicy.split
        self.overrides_prefill_limit = cls.prefill_limit is not SchedulingPolicy.prefill_limit
        self.overrides_decode_steps = cls.decode_steps is not SchedulingPolicy.decode_steps

    @property
    def faults(self) -> int:
        """Decisions that the policy failed to make."""
        return self._faults.count

    def order(self, waiting: Sequence[StateView], now: float) -> Iterator[RequestState]:
        """The waiting requests to admit, next first, each once.

        An answer is validated when the iterator reaches it; after an invalid one the others follow as they arrived.
        """
        answers: Sequence[object] = waiting
        try:
            given = self._policy.order(waiting, now)
            ends = type(given) in (tuple, list)  # a generator may not
            named = tuple(given if ends else islice(given, len(waiting) + 1))
            if len(named) > len(waiting):
                raise InvalidAnswerError(named, f"an order of at most the {len(waiting)} waiting requests")
            answers = named
        except BaseException as error:
            self._faults.add("order", error)
        seen: set[RequestState] = set()
        for answer in answers:
            state = self._waiting_state(answer)
            if state is None or state in seen:
                wanted = "one of the waiting requests that it was given, each named once"
                self._faults.add("order", InvalidAnswerError(answer, wanted))
                yield from (one for one in map(self._waiting_state, waiting) if one is not None and one not in seen)
                return
            seen.add(state)
            yield state

    def victim(self, running: Sequence[StateView]) -> RequestState:
        """The running request to preempt when blocks run out."""
        try:
            return _running_state(self._policy.victim(running), running, "one of the running requests it was given")
        except BaseException as error:
            self._faults.add("victim", error)
        return running[-1]._state

    def preempts(self, candidate: StateView, running: Sequence[StateView]) -> RequestState | None:
        """The running request to preempt for a waiting one, or None."""
        try:
            answer = self._policy.preempts(candidate, running)
            if answer is not None:
                return _running_state(answer, running, "one of the running requests it was given, or None")
        except BaseException as error:
            self._faults.add("preempts", error)
        return None

    def split(self, budget: int, waiting: Sequence[StateView], running: Sequence[StateView]) -> Split:
        """The shares of a step's token budget."""
        try:
            answer = self._policy.split(budget, waiting, running)
            if isinstance(answer, Split) and isinstance(answer.decode, int) and isinstance(answer.prefill, int):
                return answer
            raise InvalidAnswerError(answer, "a Split of two whole numbers")
        except BaseException as error:
            self._faults.add("split", error)
        return Split(decode=budget, prefill=budget)

    def prefill_limit(self, request: StateView, room: int, others: Sequence[StateView]) -> int:
        """The maximum tokens of a step for the prompt of a request: at least 1, at most `room`."""
        try:
            answer = self._policy.prefill_limit(request, room, others)
            if isinstance(answer, int):
                return max(1, min(answer, room))
            raise InvalidAnswerError(answer, "a whole number")
        except BaseException as error:
            self._faults.add("prefill_limit", error)
        return room

    def decode_steps(self, running: Sequence[StateView], waiting: Sequence[StateView]) -> int:
        """The number of iterations of the next step."""
        try:
            answer = self._policy.decode_steps(running, waiting)
            if isinstance(answer, int):
                return answer
            raise InvalidAnswerError(answer, "a whole number")
        except BaseException as error:
            self._faults.add("decode_steps", error)
        return 1

    def _waiting_state(self, answer: object) -> RequestState | None:
        """The waiting request of a view; None for anything else."""
        state = state_of(answer)
        if not isinstance(state, RequestState) or state.sequence or self._requests.get(state.id) is not state:
            return None
        return state


def _running_state(answer: object, running: Sequence[StateView], wanted: str) -> RequestState:
    """The request of a view in `running`. Raises InvalidAnswerError for anything else."""
    state = state_of(answer)
    if not isinstance(state, RequestState) or state.view not in running:
        raise InvalidAnswerError(answer, wanted)
    return state
