"""Output: what the engine returns for one request after a step."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from attrs import frozen

from engine.core.types.result import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_STOP: Final = "stop"
"""A stop token or a stop string ended the output."""
FINISH_LENGTH: Final = "length"
"""max_tokens are generated, or the context is full."""
FINISH_ABORT: Final = "abort"
FINISH_ERROR: Final = "error"
"""The request failed; Output.error says why."""


@frozen(kw_only=True)
class RequestTimes:
    """When a request arrived, was first scheduled, got its first token and finished: time.monotonic(), seconds.

    `finished` is the time of the first token while the request goes on.
    """

    arrival: float
    scheduled: float
    first_token: float
    finished: float


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The new tokens of one request after a step, or its end."""

    request: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Once, with the first token, if requested: one entry for each prompt token but the first."""
    finish_reason: FinishReason | None = None
    """None until the request finishes."""
    stop_token: int | None = None
    """The stop token that ended the request, if any: the last of `tokens`, and not part of the text."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    error: str | None = None
    """A sentence, if finish_reason is "error"."""
    refused: bool = False
    """With `error`: whether the request can never be served as given, so that the client is at fault."""
    parameter: str | None = None
    """With `refused`: the field of SamplingParams or Request at fault, if there is one."""
    times: RequestTimes | None = None
    """With the first and the last output only; `finished` is the time of the output."""
    num_tokens: int = 0
    """With the last output only: tokens generated in all."""
    preemptions: int = 0
    """With the last output only: how often the request was preempted."""
    prediction_tokens: tuple[int, int] | None = None
    """(accepted, rejected): how many verified tokens of Request.prediction are in the output so far, and how many are
    not. None: the request has no prediction, or neither number has changed since the output before."""
