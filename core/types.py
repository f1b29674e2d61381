"""The objects that travel: what a user asks, what the scheduler orders, what a step returns.

All are frozen classes of plain data (ints, floats, strings, tuples), so that any of them crosses a process boundary as
msgpack (core/executors/wire.py). They are attrs classes but for Output: each token makes one, and a msgspec.Struct is
made, written and read in a fraction of the time.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from attrs import field, frozen

from engine.core.errors import InvalidRequestError

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"

MAX_SEED = 2**63 - 1

GREEDY_BELOW_TEMPERATURE = 1e-5
"""At lower temperatures float32 probabilities leave no token but the most likely one."""


def _bounded(low: float, high: float, *, low_open: bool = False) -> Any:
    """An attrs validator: a finite number in [low, high], or (low, high] with `low_open`; None passes."""

    def check(_: Any, attribute: Any, value: float | None) -> None:
        if value is None:
            return
        above = value > low if low_open else value >= low
        if isinstance(value, bool) or not (above and value <= high):
            left = "(" if low_open else "["
            raise InvalidRequestError(
                f"{attribute.name} must be in {left}{low}, {high}], not {value!r}", attribute.name
            )

    return check


@frozen(kw_only=True)
class SamplingParams:
    """How to sample one request's tokens. The defaults sample from the model's own distribution.

    Raises InvalidRequestError, with `parameter` set, for a value out of range.
    """

    max_tokens: int | None = field(default=None, validator=_bounded(1, 2**31))
    """Most tokens to generate; None: until the context is full."""
    min_tokens: int = field(default=0, validator=_bounded(0, 2**31))
    """No stop token or stop string ends the request before so many tokens."""
    temperature: float = field(default=1.0, validator=_bounded(0, 100))
    """0: always the likeliest token."""
    top_k: int = field(default=0, validator=_bounded(0, 2**31))
    """Keep the k likeliest tokens; 0: all."""
    top_p: float = field(default=1.0, validator=_bounded(0, 1, low_open=True))
    """Keep the smallest set of likeliest tokens whose probability reaches p."""
    min_p: float = field(default=0.0, validator=_bounded(0, 1))
    """Drop tokens less likely than min_p times the likeliest."""
    repetition_penalty: float = field(default=1.0, validator=_bounded(0, 100, low_open=True))
    """Divide positive and multiply negative logits of tokens in prompt or output (CTRL, arXiv:1909.05858)."""
    presence_penalty: float = field(default=0.0, validator=_bounded(-2, 2))
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: float = field(default=0.0, validator=_bounded(-2, 2))
    """Subtracted from a token's logit once for each time it is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias) pairs added to the logits."""
    seed: int | None = field(default=None, validator=_bounded(0, MAX_SEED))
    """Same seed, same tokens, whatever else is in the batch; None: a fresh seed for each request."""
    logprobs: int | None = field(default=None, validator=_bounded(0, 1000))
    """Report each sampled token's log probability and that of so many likeliest ones; None: report none."""
    prompt_logprobs: int | None = field(default=None, validator=_bounded(0, 1000))
    """The same for each prompt token after the first."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})", "min_tokens"
            )
        for token, bias in self.logit_bias:
            if token < 0 or not math.isfinite(bias):
                raise InvalidRequestError(f"logit_bias of token {token} is {bias}; give a finite number", "logit_bias")
        if any(not text for text in self.stop):
            raise InvalidRequestError("a stop string is empty", "stop")
        if any(token < 0 for token in self.stop_token_ids):
            raise InvalidRequestError("a stop token id is negative", "stop_token_ids")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken: by temperature (0 or nearly 0), or by top_k = 1."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE or self.top_k == 1


@frozen(kw_only=True)
class Request:
    """One prompt to continue."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    priority: int = 0
    """A policy that knows priorities runs lower numbers first."""
    arrival: float = 0.0
    """time.monotonic() at arrival, seconds."""
    salt: str = ""
    """Prefix cache entries are shared only between requests of equal salt."""


@frozen(kw_only=True)
class TokenLogprobs:
    """Log probabilities at one position, before any penalty or temperature."""

    token: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the likeliest tokens, best first."""


@frozen(kw_only=True)
class NewSequence:
    """A sequence the runner has not seen: after admission, or again after a preemption, under a new number."""

    sequence: int
    tokens: tuple[int, ...]
    """The prompt, and behind it the output so far when the sequence was preempted."""
    prompt_len: int
    params: SamplingParams
    """With its seed set."""


@frozen
class PrefillChunk:
    """A stretch of known tokens of one sequence to compute: `count` of them from position `start` on."""

    sequence: int
    start: int
    count: int
    sample: bool
    """Whether the last of the tokens yields the next one; False for a chunk in the middle of a prompt."""


@frozen(kw_only=True)
class Step:
    """One batch for the runner, as a difference to the steps before it: the decodes, and behind them the chunks."""

    id: int
    decodes: tuple[int, ...]
    """Sequences that compute one token each, the one sampled last for them, and sample the next. The runner holds that
    token, so that a step can be planned before the result of the one before is known, and the token's position, since
    it counts what it has computed of each sequence. The same tuple object as in the step before if nothing changed."""
    chunks: tuple[PrefillChunk, ...]
    """Stretches of prompts, and of output that was computed before a preemption."""
    iterations: int = 1
    """Above 1 (there are no chunks then): repeat, feeding back each sampled token, without asking the scheduler."""
    new: tuple[NewSequence, ...] = ()
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(sequence, KV blocks to append to its table), for all iterations."""
    finished: tuple[int, ...] = ()
    """Sequences to forget before anything else is done; their blocks may be in use by others in this very step."""


@frozen(kw_only=True)
class StepResult:
    """What a step sampled."""

    step: int
    tokens: tuple[tuple[int, ...], ...]
    """One entry an iteration: a token for each sequence that samples, decodes first, then the chunks that sample."""
    logprobs: tuple[tuple[TokenLogprobs | None, ...], ...] = ()
    """Of the same shape, None where not asked for; empty when nobody asked."""
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()
    """(sequence, one entry a prompt position computed in this step), for sequences that asked; the entry of a position
    is about the prompt token after it."""
    seconds: tuple[tuple[str, float], ...] = ()
    """(phase, seconds): prepare, launch, sample."""


@frozen(kw_only=True)
class RequestTimes:
    """When a request arrived, was first scheduled, gave its first token and finished: time.monotonic(), seconds."""

    arrival: float
    scheduled: float
    first_token: float
    finished: float


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What is new for one request after a step."""

    request: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry a token when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Once, with the first token, when asked for: one entry for each prompt token but the first."""
    finish_reason: str | None = None
    """None while running, else stop, length, abort or error."""
    stop_token: int | None = None
    """The token that ended the request, if one did; it is the last of `tokens`, and no part of the text."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    error: str | None = None
    times: RequestTimes | None = None
    """With the last output."""


@frozen(kw_only=True)
class CacheInfo:
    """The KV cache an executor has made, and where the memory went (bytes)."""

    num_blocks: int
    block_size: int
    """Tokens a block."""
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    budget_bytes: int
    """What weights, activations and KV cache may take together."""
    device: str
    """In words."""
    dtype: str
    kv_dtype: str = ""
    """Of keys and values; empty: as dtype."""
    phases: tuple[tuple[str, float], ...] = ()
    """(phase, seconds) of starting; an executor gives those of its own `start`, an engine all."""


@frozen(kw_only=True)
class EngineStats:
    """Counters and gauges of one engine, since its start."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed."""
    generation_tokens: int = 0
    steps: int = 0
    seconds: tuple[tuple[str, float], ...] = ()
    """(phase, seconds spent in it): schedule, submit, wait, commit and the runner's own phases."""
