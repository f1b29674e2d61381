"""Contract of plugins/schedulers: which request runs next. The scheduler owns queues, blocks and budgets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from attrs import frozen

API = "1"

OptionsT = TypeVar("OptionsT")

MAX_DECODE_STEPS = 128
"""Maximum iterations of one step; a policy that asks for more gets this many."""


class RequestView(Protocol):
    """What a policy sees of a request; read-only."""

    @property
    def id(self) -> str:
        """Id of the request."""

    @property
    def priority(self) -> int:
        """Lower is more urgent."""

    @property
    def tenant(self) -> str | None:
        """The request's cache_salt; None: the tenant of all requests without one."""

    @property
    def arrival(self) -> float:
        """Arrival time: time.monotonic(), seconds."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""

    @property
    def computed_tokens(self) -> int:
        """Tokens in the KV cache, including those that planned steps will compute."""

    @property
    def output_tokens(self) -> int:
        """Tokens sampled, including those that planned steps will sample."""

    @property
    def preemptions(self) -> int:
        """How often the request was preempted."""


@frozen(kw_only=True)
class Split:
    """Maximum tokens of one step for decodes and for prefill chunks. Core keeps their sum within the budget, decodes
    first."""

    decode: int
    prefill: int


class SchedulingPolicy(ABC, Generic[OptionsT]):
    """Decides the order of admission, which request to preempt, and the shares of a step's tokens.

    OptionsT: the policy's own settings, an object of `options_class`; None for a policy without any.

    No answer, however wrong, can corrupt the cache or stop the engine. Core never changes a sequence passed to a policy
    while the policy runs, and calls it from one thread. Where a method raises, or gives an invalid answer (such as a
    request outside the sequence passed), the decision is made first come, first served: the first fault of each method
    is logged, every one counted (EngineStats.policy_faults), and the policy is asked again for the next decision.
    """

    api: ClassVar[str]
    options_class: ClassVar[type | None] = None

    @classmethod
    def refuses(cls) -> str | None:
        """A sentence that says why this policy cannot be used here and what would work; None if it can."""
        return None

    def __init__(self, options: OptionsT = None) -> None:  # type: ignore[assignment]  # None: no options_class
        self.options = options

    @abstractmethod
    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """The waiting requests, next to be admitted first. now: time.monotonic(), seconds.

        `waiting` is in order of arrival and includes preempted requests. A request left out waits, unless nothing else
        runs. To name a request twice is an invalid answer.
        """

    @abstractmethod
    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """The request to preempt when KV blocks run out: one of `running` (never empty, oldest admission first)."""

    def preempts(self, candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        """A running request to preempt so that the waiting `candidate` can be admitted; None: the candidate waits.

        Also called with a single prefilling request when there is room for both: returning that request then preempts
        nothing, and only puts the candidate's prefill first.
        """
        return None

    def split(self, budget: int, waiting: Sequence[RequestView], running: Sequence[RequestView]) -> Split:
        """The shares of a step's token budget; by default decodes take what they need, and prefill takes the rest."""
        return Split(decode=budget, prefill=budget)

    def prefill_limit(self, request: RequestView, room: int, others: Sequence[RequestView]) -> int:
        """Maximum tokens of the next step for the prompt of `request`, so that `others` need not wait for all of it.

        Called while more of the prompt is left than a step computes, and `others` prefill or wait. room: tokens that
        the step has left for prompts. Tokens that the others leave unused are added. By default the request takes all.
        """
        return room

    def decode_steps(self, running: Sequence[RequestView], waiting: Sequence[RequestView]) -> int:
        """Number of iterations of the next step, when every running sequence decodes.

        Core plans at most 128 (MAX_DECODE_STEPS), and fewer where outputs end or blocks run out. Stops, aborts and
        arrivals take effect only after the last iteration.
        """
        return 1
