"""What is recorded of one HTTP request for its trace: times and counts, never content.

Times are time.monotonic(), seconds. The exporter's thread builds the spans when the request has ended (otlp_spans.py),
so that a request in progress costs only a few assignments.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

from attrs import Factory, define

from engine.core.types import FINISH_ABORT, Output, Request, RequestTimes, SamplingParams
from engine.server.front_end.trace_context import TraceContext

TRACE = "trace"
"""Name of a request's RequestTrace in the scope's state."""
MAX_CHOICES = 16
"""Choices of a request that have spans of their own."""

Attributes = dict[str, bool | int | float | str | tuple[str, ...]]
"""Attributes of a span."""


@define
class ChoiceTrace:
    """One choice of a generation."""

    prompt_tokens: int
    scheduled: float | None = None
    """When the choice was first in a step; None: it never was, or its first output has not come."""
    first_token: float | None = None
    ended: float | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    output_tokens: int = 0
    finish_reason: str = FINISH_ABORT
    """As the engine says, or the front end, which ends choices at stop strings."""
    preemptions: int | None = None
    """How often the choice was preempted; None: unknown, since the engine has not ended the choice."""


@define
class GenerationTrace:
    """The generation of a request."""

    arrival: float
    """When the prompt was tokenized and checked."""
    attributes: Attributes
    """Attributes of the request's span, by the conventions for generative AI."""
    choices: list[ChoiceTrace]
    """The first MAX_CHOICES choices."""
    cached_tokens: int = 0
    """Cached prompt tokens of all choices, each prompt counted once."""
    output_tokens: int = 0
    """Output tokens of all choices."""

    @classmethod
    def of(
        cls, operation: str, model: str, name: str, requests: Sequence[Request], choices_per_prompt: int, stream: bool
    ) -> GenerationTrace:
        """The trace of a generation that begins.

        operation: gen_ai.operation.name. name: id of the response. requests: one per prompt.
        """
        params = requests[0].params
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "engine",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": name,
            "gen_ai.request.stream": stream,
            "gen_ai.usage.input_tokens": sum(len(request.prompt) for request in requests),
            **_sampling(params),
        }
        if choices_per_prompt > 1:
            attributes["gen_ai.request.choice.count"] = choices_per_prompt
        num_choices = min(len(requests) * choices_per_prompt, MAX_CHOICES)
        prompts = (len(requests[choice // choices_per_prompt].prompt) for choice in range(num_choices))
        return cls(requests[0].arrival, attributes, [ChoiceTrace(tokens) for tokens in prompts])

    def begin_choice(self, choice: int, times: RequestTimes | None, cached_tokens: int, first: bool) -> None:
        """Record a choice's first output. first: whether the choice is the first of its prompt."""
        if first:
            self.cached_tokens += cached_tokens
        if choice < len(self.choices):
            one = self.choices[choice]
            one.cached_tokens = cached_tokens
            one.first_token = time.monotonic()
            if times is not None:
                one.scheduled, one.first_token = times.scheduled, times.first_token

    def end_choice(self, choice: int, reason: str, last: Output | None = None) -> None:
        """Record a choice's finish. last: the last output of the engine, if the engine has ended the choice."""
        if choice < len(self.choices):
            one = self.choices[choice]
            one.finish_reason = reason
            one.ended = time.monotonic() if last is None or last.times is None else last.times.finished
            one.preemptions = None if last is None else last.preemptions

    def end(self, output_tokens: Mapping[int, int]) -> None:
        """Record the end of all choices; output_tokens: of each choice that has any."""
        self.output_tokens = sum(output_tokens.values())
        now = time.monotonic()
        for number, one in enumerate(self.choices):
            one.output_tokens = output_tokens.get(number, 0)
            if one.ended is None:
                one.ended = now


@define(kw_only=True)
class RequestTrace:
    """One HTTP request."""

    context: TraceContext
    """The request's own span."""
    parent: TraceContext | None
    """The client's span."""
    method: str
    path: str
    scheme: str
    http_version: str
    client: str
    """Address; empty for a Unix domain socket."""
    began: float
    ended: float = 0.0
    preparing: float | None = None
    """When checking and tokenizing began."""
    route: str = ""
    """Empty if no route answered."""
    status: int = 0
    """Status of the response; 0: the client left before the response began."""
    complete: bool = False
    """Whether the response was sent to its end."""
    request_id: str = ""
    error_type: str = ""
    error_message: str = ""
    """Message of a failure of the server; empty for other errors."""
    generation: GenerationTrace | None = None

    def fail(self, status: int, code: str | None, message: str) -> None:
        """Record the error that the client gets; the message only of a server's failure: others repeat content."""
        self.error_type = code or str(status)
        if status >= 500:
            self.error_message = message


@define
class Tracer:
    """Begins the traces of requests, and hands the sampled ones over when they have ended."""

    sample: float
    """Share of the requests without a context of the client that are recorded, 0 to 1."""
    put: Callable[[RequestTrace], None]
    """Takes the trace of a request that has ended; never waits."""
    _random: random.Random = Factory(random.Random)

    def begin(self, parent: TraceContext | None) -> TraceContext:
        """The span of a request that begins; parent: the client's. A client's choice to record or not is followed."""
        span_id = f"{self._random.getrandbits(64) or 1:016x}"
        if parent is not None:
            return TraceContext(parent.trace_id, span_id, parent.sampled, parent.state)
        number = self._random.getrandbits(128) or 1
        return TraceContext(f"{number:032x}", span_id, (number & (2**64 - 1)) < self.sample * 2**64)

    def end(self, trace: RequestTrace) -> None:
        """Hand over a trace that has ended."""
        if trace.context.sampled:
            self.put(trace)


def _sampling(params: SamplingParams) -> Attributes:
    """The sampling parameters that apply."""
    found: Attributes = {"gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p}
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if params.top_k:
        found["gen_ai.request.top_k"] = params.top_k
    if params.seed is not None:
        found["gen_ai.request.seed"] = params.seed
    if params.frequency_penalty:
        found["gen_ai.request.frequency_penalty"] = params.frequency_penalty
    if params.presence_penalty:
        found["gen_ai.request.presence_penalty"] = params.presence_penalty
    return found
