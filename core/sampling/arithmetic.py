"""The arithmetic of sampling by PyTorch's operations: batched functions without state that never wait for the device.

A row's result does not depend on the other rows, except for the rounding of sums, whose order may change with the batch
size.
"""

from __future__ import annotations

import numpy as np
import torch

MAX_SELECTED_TOP_K = 1024
"""Up to this k, the k most likely tokens are selected; above, the row is sorted."""

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_NEVER = -float("inf")


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right logically; torch's >> copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), on int64 with wrap-around."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The random number of each row's output token, a function of key and position only.

    keys: [rows] int64, `mix` of the seeds; positions: [rows] int64, number of outputs before. Returns [rows] float64 in
    [0, 1): number `positions` of the SplitMix64 sequence that starts at the key.
    """
    return _shift_right(mix(keys + (positions + 1) * _GOLDEN), 11).double() * 2.0**-53


def penalize(
    scores: torch.Tensor,
    seen: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Apply the repetition penalty, then the frequency and presence penalties.

    scores: [rows, vocab] float32; seen: [rows, vocab] bool, in prompt or output; counts: [rows, vocab], occurrences
    in the output; the penalties: [rows, 1] float32.
    """
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    return scores - frequency * counts - presence * (counts > 0)


def apply_masks(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Rule out the tokens whose bits are 0.

    logits: [rows, vocab]; masks: [rows, ceil(vocab / 32)] int32, token t is bit t % 32 of word t // 32.
    """
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=masks.device)
    forbidden = (masks.view(torch.uint8)[:, :, None] & powers) == 0
    return logits.masked_fill(forbidden.view(len(masks), -1)[:, : logits.shape[-1]], _NEVER)


def cutoffs(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, max_top_k: int) -> torch.Tensor:
    """The lowest score that top-k and then top-p keep in each row: [rows, 1].

    scores: [rows, vocab]; top_k: [rows, 1] int64, none above `max_top_k`; top_p: [rows, 1], above 1 for rows
    without.
    Tokens that tie with the last one kept are kept too, so that the result does not depend on a sort's order.
    """
    ordered = scores.topk(max_top_k, dim=-1).values if max_top_k <= MAX_SELECTED_TOP_K else _descending(scores)
    outside = torch.arange(ordered.shape[-1], device=scores.device) >= top_k
    probs = ordered.masked_fill(outside, _NEVER).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # mass of the more likely tokens
    kept = ((before < top_p) & ~outside).sum(dim=-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, kept - 1)


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """Sort each row; on the CPU by numpy, which keeps no indices and takes a quarter of torch's time."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    return scores.sort(dim=-1, descending=True).values


def draw(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative distribution passes `uniform`: [rows] int64, never one of probability 0.

    scores: [rows, vocab] float32; uniform: [rows] float64 in [0, 1). A row of NaN yields some token of the vocabulary.
    """
    return draw_weights(scores.softmax(dim=-1), uniform)


def draw_weights(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`draw` from weights [rows, vocab], not negative and not all 0, which need not sum to 1."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, whatever the rounding: a token with a probability above 0 then follows.
    point = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
    return tokens.clamp(max=weights.shape[-1] - 1)


def row_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probability and rank of one token per row, and the `count` most likely tokens.

    logits: [rows, vocab]; tokens: [rows] int64. Returns (logprobs [rows], ranks [rows] from 1, top logprobs [rows,
    count], top tokens [rows, count]). All log probabilities of a row are NaN if its logits are not finite.
    """
    logits = logits.float()
    norm = logits.logsumexp(dim=-1, keepdim=True)
    norm = norm.where(norm.isfinite(), torch.nan)
    chosen = logits.gather(-1, tokens[:, None])
    ranks = (logits > chosen).sum(dim=-1) + 1
    best = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return (chosen - norm).squeeze(-1), ranks, best.values - norm, best.indices
