"""StepResult: what the runner sends back for one step."""

from __future__ import annotations

from typing import Final

import msgspec
from attrs import frozen

from engine.core.types.statistics import HistogramCounts

NO_TOKEN: Final = -1
"""In StepResult.tokens: the sequence's logits were not finite (NaN or infinite), so no token could be sampled."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log probabilities at one position, before any penalty or temperature; with a grammar, among the tokens that the
    grammar allows there."""

    token: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most likely tokens, most likely first."""


@frozen(kw_only=True)
class StepResult:
    """The tokens and log probabilities that a step sampled."""

    step: int
    tokens: tuple[tuple[int, ...], ...]
    """One row per iteration: a token, or NO_TOKEN, for each sequence that samples, decodes first, then the chunks that
    sample."""
    logprobs: tuple[tuple[TokenLogprobs | None, ...], ...] = ()
    """Of the shape of `tokens`; None for a sequence that did not request them, empty if no sequence did."""
    verified: tuple[tuple[int, ...], ...] = ()
    """For each of Step.drafts, the drafts accepted and the token sampled after them, which may be NO_TOKEN."""
    verified_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each of Step.drafts, one entry per token; () for a sequence that did not request them, empty if none did."""
    proposals: tuple[tuple[int, ...], ...] = ()
    """With Step.propose: for each sequence that samples, decodes first, then the chunks that sample, then the draft
    slices, the tokens that most likely follow the token sampled last; fewer where the sequence's blocks end."""
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()
    """(sequence, one entry per prompt position computed in this step), for sequences that requested them; the entry of
    a position is about the prompt token after that position."""
    seconds: tuple[tuple[str, float], ...] = ()
    """(phase, seconds): prepare, launch, sample."""
    kernels_compiled: int = 0
    """Kernels that the step compiled, or loaded from the kernel cache, because the start-up had not; on rank 0."""
    graphs_captured: int = 0
    """CUDA graphs that the step captured because the start-up had not; on rank 0."""
    graph_size: int | None = None
    """What the CUDA graphs that ran the step were captured for: number of sequences, or of tokens where the step has
    chunks or drafts. 0: the step ran without graphs. None: there are no graphs."""
    gc_pauses: tuple[HistogramCounts, ...] = ()
    """Durations of the garbage collections so far, seconds, by generation, in the process of rank 0; () from an
    executor that runs in the engine's process."""
