"""Asks a scheduling policy and checks its answers, so that the scheduler can rely on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from engine.core.errors import PluginError
from engine.core.schedulers.policy import SchedulingPolicy, Split
from engine.core.schedulers.request_state import RequestState, StateView, state_of


class CheckedPolicy:
    """A policy whose answers name only requests it was asked about.

    Every method raises PluginError, naming the policy's class, when the policy raises or gives an impossible answer.
    `requests`: all requests of the scheduler by id.

    displaces, splits, repeats: whether it has its own `preempts`, `split` and `decode_steps`; one that has not need not
    be asked, nor be shown views.
    """

    def __init__(self, policy: SchedulingPolicy, requests: Mapping[str, RequestState]) -> None:
        self._policy = policy
        self._requests = requests
        kind = type(policy)
        self.displaces = kind.preempts is not SchedulingPolicy.preempts
        self.splits = kind.split is not SchedulingPolicy.split
        self.repeats = kind.decode_steps is not SchedulingPolicy.decode_steps

    def order(self, waiting: Sequence[StateView], now: float) -> Iterator[RequestState]:
        """The waiting requests to admit, next first, each once. Checked one by one, as far as they are taken."""
        seen: set[RequestState] = set()
        for answer in self._ask(lambda: tuple(self._policy.order(waiting, now)), "order"):
            state = state_of(answer)
            if state in seen:
                continue
            if state is None or state.sequence or self._requests.get(state.id) is not state:
                self._refuse("order", answer, "a waiting request")
            seen.add(state)
            yield state

    def victim(self, running: Sequence[StateView]) -> RequestState:
        """Whom to preempt when blocks run out."""
        answer = self._ask(lambda: self._policy.victim(running), "victim")
        state = state_of(answer)
        if state is None or state.view not in running:
            self._refuse("victim", answer, "a running request")
        return state

    def preempts(self, candidate: StateView, running: Sequence[StateView]) -> RequestState | None:
        """Whom to preempt for a waiting request; None: nobody."""
        answer = self._ask(lambda: self._policy.preempts(candidate, running), "preempts")
        if answer is None:
            return None
        state = state_of(answer)
        if state is None or state.view not in running:
            self._refuse("preempts", answer, "a running request or None")
        return state

    def split(self, budget: int, waiting: Sequence[StateView], running: Sequence[StateView]) -> Split:
        """Shares of a step's tokens."""
        answer = self._ask(lambda: self._policy.split(budget, waiting, running), "split")
        if not (isinstance(answer, Split) and isinstance(answer.decode, int) and isinstance(answer.prefill, int)):
            self._refuse("split", answer, "a Split of two whole numbers")
        return answer

    def decode_steps(self, running: Sequence[StateView], waiting: Sequence[StateView]) -> int:
        """How many decode steps to issue at once."""
        answer = self._ask(lambda: self._policy.decode_steps(running, waiting), "decode_steps")
        if not isinstance(answer, int):
            self._refuse("decode_steps", answer, "a whole number")
        return answer

    def _ask(self, question: Callable[[], Any], name: str) -> Any:
        try:
            return question()
        except Exception as error:
            raise PluginError(
                f"scheduling policy {type(self._policy).__qualname__} failed in {name}(): "
                f"{type(error).__name__}: {error}; mend it or choose another policy"
            ) from error

    def _refuse(self, name: str, answer: object, wanted: str) -> NoReturn:
        raise PluginError(
            f"scheduling policy {type(self._policy).__qualname__} answered {answer!r} to {name}(), "
            f"which is not {wanted} that it was given; mend it or choose another policy"
        )
