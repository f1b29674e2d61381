"""Contract of plugins/speculators: which tokens most likely come next. Core verifies every proposal.

A speculator runs on the host (Speculator, here) or on the device, next to the model (DeviceSpeculator, device.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.core.models.base import ModelSpec

API = "2"
"""Version of this contract. "2": speculators on the device, and `target` and `config` in SpeculatorSpec."""
OptionsT = TypeVar("OptionsT")


@frozen(kw_only=True)
class SpeculatorSpec:
    """What a speculator proposes for."""

    vocab_size: int
    """Tokens are ids from 0 to vocab_size - 1."""
    max_len: int
    """Maximum tokens of a sequence, prompt and output."""
    max_drafts: int
    """Maximum tokens of a proposal."""
    target: ModelSpec | None = None
    """The model that verifies the proposals. None: unknown, in tests."""
    config: Mapping[str, Any] | None = None
    """config.json of the speculator's own checkpoint (speculator.model); None: that setting is empty."""
    target_config: Mapping[str, Any] | None = None
    """config.json of the model that verifies the proposals. None: unknown, in tests."""


@frozen(kw_only=True, eq=False)
class SpeculatedSequence:
    """A running request, as speculators see it: one object per request, the same at each call."""

    request_id: str
    """Unique among the requests that have not finished."""
    tokens: Sequence[int] = field(repr=False)
    """Prompt and output so far, read-only. Grows between calls, and never changes otherwise; `len` and access to one
    token take constant time."""
    prompt_length: int
    """Number of prompt tokens, the first of `tokens`."""
    tenant: str | None = None
    """The request's cache_salt. What is learned from a request must not show in proposals for other tenants: the time
    of an answer would reveal what others wrote. None: the tenant of all requests without one."""


class Speculator(ABC, Generic[OptionsT]):
    """Proposes the next tokens of sequences, on the host, in the engine process.

    OptionsT: the speculator's own settings, an object of `options_class`; None for a speculator without any.

    No proposal, however wrong, changes what is generated: core verifies proposed tokens, and drops the first that the
    model does not generate, with those after it. A wrong proposal costs time only. All methods are called by one thread
    between steps, and delay the next step, so they must be quick. Where a method raises, or a proposal is invalid,
    there is no proposal; the first fault of each method is logged, and all are counted.
    """

    api: ClassVar[str]
    """Version of the contract that the class was written for."""
    options_class: ClassVar[type | None] = None
    """Frozen attrs class of the plugin's own settings ([speculator.options]); None: no settings."""

    @classmethod
    def refuses(cls, spec: SpeculatorSpec) -> str | None:
        """A sentence that says why this speculator cannot be used here and what would work; None if it can."""
        return None

    def __init__(self, spec: SpeculatorSpec, options: OptionsT = None) -> None:  # type: ignore[assignment]  # None: no options_class
        """Called once, before the first request.

        options: an instance of `options_class`, None without one.
        """
        self.spec = spec
        self.options = options

    @abstractmethod
    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        """The tokens that most likely come next, in order: ints, at most `limit`; empty for no proposal.

        limit: at least 1, at most SpeculatorSpec.max_drafts. Called any number of times for equal tokens.
        """

    def accepted(self, request_id: str, verified: int, accepted: int) -> None:
        """Learn how many tokens of a request's latest proposal a step verified, and how many of these were accepted.

        verified: tokens of the proposal, at least 1; may be fewer than it had. Not called for a proposal that was
        not verified, as when a request ends.
        """

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended. Called once per request, even if there never was a proposal for it."""
