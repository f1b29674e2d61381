"""Calls a scheduling policy and validates its answers, so that the scheduler can rely on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from engine.core.errors import PluginError
from engine.core.schedulers.policy import RequestView, SchedulingPolicy, Split
from engine.core.schedulers.request_state import RequestState, StateView, state_of

T = TypeVar("T")


class CheckedPolicy:
    """A policy whose answers name only requests that it was shown.

    Every method raises PluginError, naming the policy's class, when the policy raises or gives an invalid answer.
    `requests`: all requests of the scheduler, by id.

    overrides_preempts, overrides_split, overrides_decode_steps: whether the policy has a method of its own; otherwise
    the scheduler need not call it, nor build the views it would be shown.
    """

    def __init__(self, policy: SchedulingPolicy[Any], requests: Mapping[str, RequestState]) -> None:
        self._policy = policy
        self._requests = requests
        cls = type(policy)
        self.overrides_preempts = cls.preempts is not SchedulingPolicy.preempts
        self.overrides_split = cls.split is not SchedulingPolicy.split
        self.overrides_decode_steps = cls.decode_steps is not SchedulingPolicy.decode_steps

    def order(self, waiting: Sequence[StateView], now: float) -> Iterator[RequestState]:
        """The waiting requests to admit, next first, each once. An answer is validated when the iterator reaches it."""
        seen: set[RequestState] = set()
        for answer in self._call(lambda: tuple(self._policy.order(waiting, now)), "order"):
            state = state_of(answer)
            if state in seen:
                continue
            if state is None or state.sequence or self._requests.get(state.id) is not state:
                self._reject("order", answer, "one of the waiting requests it was given")
            seen.add(state)
            yield state

    def victim(self, running: Sequence[StateView]) -> RequestState:
        """The running request to preempt when blocks run out."""
        answer = self._call(lambda: self._policy.victim(running), "victim")
        state = state_of(answer)
        if state is None or state.view not in running:
            self._reject("victim", answer, "one of the running requests it was given")
        return state

    def preempts(self, candidate: StateView, running: Sequence[StateView]) -> RequestState | None:
        """The running request to preempt for a waiting one, or None."""
        answer: RequestView | None = self._call(lambda: self._policy.preempts(candidate, running), "preempts")
        if answer is None:
            return None
        state = state_of(answer)
        if state is None or state.view not in running:
            self._reject("preempts", answer, "one of the running requests it was given, or None")
        return state

    def split(self, budget: int, waiting: Sequence[StateView], running: Sequence[StateView]) -> Split:
        """The shares of a step's token budget."""
        answer = self._call(lambda: self._policy.split(budget, waiting, running), "split")
        if not (isinstance(answer, Split) and isinstance(answer.decode, int) and isinstance(answer.prefill, int)):
            self._reject("split", answer, "a Split of two whole numbers")
        return answer

    def decode_steps(self, running: Sequence[StateView], waiting: Sequence[StateView]) -> int:
        """The number of iterations of the next step."""
        answer = self._call(lambda: self._policy.decode_steps(running, waiting), "decode_steps")
        if not isinstance(answer, int):
            self._reject("decode_steps", answer, "a whole number")
        return answer

    def _call(self, method: Callable[[], T], name: str) -> T:
        try:
            return method()
        except Exception as error:
            raise PluginError(
                f"scheduling policy {type(self._policy).__qualname__} failed in {name}(): "
                f"{type(error).__name__}: {error}; fix it or choose another policy"
            ) from error

    def _reject(self, name: str, answer: object, wanted: str) -> NoReturn:
        raise PluginError(
            f"scheduling policy {type(self._policy).__qualname__} returned {answer!r} from {name}(), "
            f"which is not {wanted}; fix it or choose another policy"
        )
