"""Perplexity of a text under a checkpoint, through the engine, so that the measured kernels are those that serve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import frozen

from engine.core.engine import Engine
from engine.core.errors import ConfigError, ExecutorError
from engine.core.types import SamplingParams

AT_ONCE = 8
"""Maximum windows per call of the engine."""
QUICK = 2.0
"""After a call of fewer seconds, the next one has twice the windows. Longer calls would hold up reports of progress."""


@frozen(kw_only=True)
class Perplexity:
    """How well a model predicts a text."""

    loss: float
    """Mean of -ln p over the scored tokens."""
    tokens: int
    """Scored tokens: all but the first."""
    context: int
    """Tokens per window."""
    stride: int
    """Tokens from one window to the next."""

    @property
    def value(self) -> float:
        """e to the loss."""
        return math.exp(self.loss)


def windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first scored) of windows over `count` tokens; each token but the first is scored once.

    A token is scored in the first window that holds it, so that outside the first window it has at least
    context - stride tokens before it. stride: less than context.
    """
    scored = 1
    for begin in range(0, count, stride):
        end = min(begin + context, count)
        if scored < end:
            yield begin, end, scored
        scored = end
        if end == count:
            return


def check_windows(context: int, stride: int, max_len: int) -> None:
    """Raises ConfigError if windows cannot be scored, or do not fit into a context of `max_len` tokens."""
    if not 0 < stride < context:
        raise ConfigError(
            f"windows of {context} tokens cannot have a stride of {stride}: a token with none before it cannot be"
            f" scored; use windows of 2 tokens or more, and a stride from 1 to {max(1, context - 1)}"
        )
    if context >= max_len:
        raise ConfigError(f"--context {context} does not fit the model's {max_len}; use {max_len - 1}")


def measure(
    engine: Engine,
    tokens: Sequence[int],
    *,
    context: int = 1024,
    stride: int = 512,
    on_progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of `tokens` under the engine's model. on_progress: called with scored windows, and all of them.

    Raises ConfigError for fewer than two tokens, or windows that do not fit into the engine's context.
    """
    check_windows(context, stride, engine.max_len)
    if len(tokens) < 2:
        raise ConfigError("the held-out text has fewer than two tokens, so there is nothing to predict")
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    every = list(windows(len(tokens), context, stride))
    total = 0.0
    finished, at_once = 0, 1
    while finished < len(every):
        began = time.perf_counter()
        some = every[finished : finished + at_once]
        done = engine.generate([list(tokens[begin:end]) for begin, end, _ in some], params)
        for (begin, _, scored), completion in zip(some, done, strict=True):
            if completion.error is not None:
                raise ExecutorError(completion.error)
            assert completion.prompt_logprobs is not None
            # The first entry belongs to the window's second token.
            total -= sum(one.logprob for one in completion.prompt_logprobs[scored - begin - 1 :])
        finished += len(some)
        if on_progress is not None:
            on_progress(finished, len(every))
        if time.perf_counter() - began < QUICK:
            at_once = min(2 * at_once, AT_ONCE)
    return Perplexity(loss=total / (len(tokens) - 1), tokens=len(tokens) - 1, context=context, stride=stride)


def perplexity(
    model: str | Path,
    text: str,
    *,
    context: int = 1024,
    stride: int = 512,
    on_progress: Callable[[int, int], None] | None = None,
    **settings: object,
) -> Perplexity:
    """Perplexity of a checkpoint, in a new engine. on_progress: as in `measure`.

    settings: keyword arguments of Engine (executor__device="cpu"). Raises what Engine and `measure` raise.
    """
    chosen = {"scheduler__max_running": AT_ONCE, "executor__graphs": "off", **settings}
    with Engine(str(model), **chosen) as engine:  # type: ignore[arg-type]
        tokens = engine.tokenizer.encode(text, add_special_tokens=False)
        return measure(engine, tokens, context=context, stride=stride, on_progress=on_progress)
