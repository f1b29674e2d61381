"""Contract of plugins/schedulers: which request runs next. The scheduler owns queues, blocks and budgets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from attrs import frozen

API = "1"

MAX_DECODE_STEPS = 128
"""Decode steps issued at once, at most; a policy that asks for more gets so many."""


class RequestView(Protocol):
    """What a policy sees of a request; read-only."""

    @property
    def id(self) -> str:
        """The request's own name."""

    @property
    def priority(self) -> int:
        """Lower is more urgent."""

    @property
    def arrival(self) -> float:
        """time.monotonic() seconds."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def computed_tokens(self) -> int:
        """Tokens in the KV cache, or on their way there in a step already planned."""

    @property
    def output_tokens(self) -> int:
        """Tokens sampled, or being sampled in a step already planned."""

    @property
    def preemptions(self) -> int:
        """How often it was preempted."""


@frozen(kw_only=True)
class Split:
    """Most tokens of one step for sequences that decode and for prompts. Core keeps their sum within the budget,
    decodes first."""

    decode: int
    prefill: int


class SchedulingPolicy(ABC):
    """Decides order, victim and shares. No answer, however wrong, can corrupt the cache or stop the engine.

    Core never changes a sequence handed to a policy while the policy runs, and calls it from one thread. An answer that
    names a request outside the sequence given raises PluginError.
    """

    api: ClassVar[str]
    options_class: ClassVar[type | None] = None

    @classmethod
    def refuses(cls) -> str | None:
        """A sentence that says why this policy cannot be used here and what would work; None if it can."""
        return None

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @abstractmethod
    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        """The waiting requests, next to run first. `waiting` comes in arrival order, preempted ones included.

        One left out waits, unless nothing else runs.
        """

    @abstractmethod
    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """Whom to preempt when KV blocks run out: one of `running` (never empty, oldest admission first)."""

    def preempts(self, candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        """A running request to preempt so that waiting `candidate` gets its room; None: let it wait.

        It is also asked of a single request in the middle of its prompt, when there is room for both: naming that one
        then lets the candidate's prompt be computed first, and preempts nobody.
        """
        return None

    def split(self, budget: int, waiting: Sequence[RequestView], running: Sequence[RequestView]) -> Split:
        """How to share a step's token budget; the default lets decodes take what they need and prompts the rest."""
        return Split(decode=budget, prefill=budget)

    def decode_steps(self, running: Sequence[RequestView], waiting: Sequence[RequestView]) -> int:
        """How many decode steps to issue at once when every running sequence decodes; core issues fewer where outputs
        end or blocks run out. Stops, aborts and arrivals are honoured only after the last of them."""
        return 1
