"""Verification of draft tokens: what is generated is distributed as without drafts (Leviathan, Kalman, Matias 2023).

A slice is a sequence's last token and the drafts after it, k at most; its logits are rows of the batch, one more than
it has drafts. Row i has the logits after the first i drafts, processed as those of a token without drafts
(temperature, top_k, top_p, min_p, ...). The first drafts that are accepted are kept, and one token more.

Two rules, for two kinds of drafts:

- A draft without probabilities, as all speculators propose: each row's token is drawn as without drafts, by the random
  number of its position, and the draft is accepted if it is that token (`accept_matching`). So draft x is accepted with
  probability p(x), and a rejected one is replaced by a draw from p without x. With a seed the tokens are those of
  decoding without drafts, one by one; greedy rows too.
- A draft drawn from probabilities q: it is accepted with probability min(1, p(x) / q(x)), and a rejected one is
  replaced by a draw from max(p - q, 0), normalized (`verify_drafts`). More of them are accepted. The tokens are
  distributed as without drafts, but with a seed they are others. The sampler does not use this rule yet: no speculator
  reports probabilities.

The token after the accepted drafts is drawn by the random number of its position. The random numbers that accept drafts
are a second stream, and those by which a draft model draws must be a third: each is a function of seed and position.
"""

from __future__ import annotations

from typing import Final

import torch

from engine.core.sampling.arithmetic import draw_weights, mix, uniforms

ACCEPT: Final = 1
"""Stream of the numbers by which drafts are accepted."""


def stream_keys(keys: torch.Tensor, stream: int) -> torch.Tensor:
    """The keys of another stream of random numbers, for `uniforms`.

    keys: int64, `mix` of the seeds; stream: not 0, which is that of `uniforms(keys, ...)` itself.
    """
    return mix(keys ^ stream)


def accept_matching(drafts: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """How many first drafts of each slice are the tokens sampled in their place: [slices] int64.

    drafts: [slices, k] int64, -1 where a slice has fewer; sampled: [slices, k] int64, the tokens sampled from the rows
    before each draft.
    """
    return (drafts == sampled).long().cumprod(dim=1).sum(dim=1)


def greedy_scores(logits: torch.Tensor) -> torch.Tensor:
    """Scores that leave greedy rows no choice: 0 for the first of the largest logits, -inf for the other tokens.

    logits: [rows, vocab]. Returns [rows, vocab] float32.
    """
    scores = torch.full_like(logits, -float("inf"), dtype=torch.float32)
    return scores.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 0.0)


def verify_drafts(
    scores: torch.Tensor,
    first: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor,
    keys: torch.Tensor,
    num_outputs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept or replace drafts that were drawn from probabilities.

    scores: [rows, vocab] float32, of `draw.kept_scores` (-inf where ruled out) or of `greedy_scores`; first: [slices]
    int64, each slice's first row; drafts: [slices, k] int64, -1 where a slice has fewer; draft_probs: [slices, k,
    vocab] float32, what each draft was drawn from, normalized; keys, num_outputs: [slices] int64, as of `uniforms`.

    Returns (number of accepted drafts, the token after them), both [slices] int64.
    """
    slices, k = drafts.shape
    given = (drafts >= 0).long().cumprod(dim=1)
    num_drafts = given.sum(dim=1)
    if k:
        steps = torch.arange(k, device=drafts.device)
        rows = first[:, None] + torch.minimum(steps, num_drafts[:, None])
        tokens = drafts.clamp(min=0)[:, :, None]
        p = scores[rows].softmax(dim=-1).gather(2, tokens).squeeze(2)
        q = draft_probs.gather(2, tokens).squeeze(2)
        chances = uniforms(stream_keys(keys, ACCEPT)[:, None], num_outputs[:, None] + steps)
        counts = (given * (chances * q < p)).cumprod(dim=1).sum(dim=1)
    else:
        counts = num_drafts
    weights = scores[first + counts].softmax(dim=-1)
    if k:
        rest = weights - draft_probs[torch.arange(slices, device=drafts.device), counts.clamp(max=k - 1)]
        rest = rest.clamp(min=0)
        # Nothing is left where p and q are equal up to rounding.
        replaced = (counts < num_drafts) & (rest.sum(dim=-1) > 0)
        weights = torch.where(replaced[:, None], rest, weights)
    return counts, draw_weights(weights, uniforms(keys, num_outputs + counts))
