"""A request sent to the engine, and what is observed of it at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from engine.core.types import RequestTimes
from engine.server.shared.request_metrics import FinishedRequest, ReplicaMetrics

if TYPE_CHECKING:
    from engine.server.front_end.request_group import RequestGroup


@define(eq=False)
class Prompt:
    """What the choices of one prompt share."""

    num_tokens: int
    max_tokens: int
    """Maximum tokens of each choice."""
    choices: int
    unfinished: int
    """Choices that have not finished; those that are aborted never do."""
    most_tokens: int = 0
    """Tokens of the longest choice that has finished."""


@define(eq=False)
class OpenRequest:
    """A request sent to the engine that has not ended: one choice of a prompt."""

    group: RequestGroup
    index: int
    """Index in the group."""
    prompt: Prompt
    replica: int
    output_cost: int
    """Load on the replica once the first token has come; see routing.Placement."""
    load: int
    """Current load on the replica, tokens."""
    arrival: float
    last_token: float = 0.0
    """When the latest tokens came."""
    has_tokens: bool = False
    times: RequestTimes | None = None
    """The request's times, known with the first token."""
    cached_tokens: int = 0
    """Tokens of the prompt that were in the prefix cache, known with the first token."""

    def finish(
        self, metrics: ReplicaMetrics, reason: str, times: RequestTimes | None, num_tokens: int, now: float
    ) -> None:
        """Observe that the request has finished, and with the last choice of a prompt, the prompt.

        times: None if no step has computed anything for the request. num_tokens: tokens generated.
        """
        prompt = self.prompt
        metrics.observe_finish(
            FinishedRequest(
                reason=reason,
                times=times,
                seconds=now - self.arrival,
                prompt_tokens=prompt.num_tokens,
                cached_tokens=self.cached_tokens,
                generation_tokens=num_tokens,
                max_tokens=prompt.max_tokens,
            )
        )
        prompt.unfinished -= 1
        prompt.most_tokens = max(prompt.most_tokens, num_tokens)
        if not prompt.unfinished:
            metrics.observe_prompt(prompt.choices, prompt.most_tokens)
