"""Speculative sampling by the paper (Leviathan, Kalman, Matias 2023, algorithm 1), for many sequences of a small model.

Written from the paper with numpy, independently of core/sampling/verify.py. `fault` names one wrong rule, by which
tests show that they would notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.core.sampling.arithmetic import mix

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
FAULTS = ("accepts by q / p", "accepts always", "replaces by p", "replaces by q - p", "one number twice", "no bonus")


class TokenModel:
    """A model whose next token depends on the last token alone: probabilities [vocab, vocab]."""

    def __init__(self, probs: Floats) -> None:
        self.probs = probs
        self.vocab = len(probs)

    @classmethod
    def random(cls, vocab: int, seed: int, spread: float = 1.5) -> TokenModel:
        scores = np.random.default_rng(seed).normal(size=(vocab, vocab)) * spread
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        return cls(exponentials / exponentials.sum(axis=1, keepdims=True))

    def mixed(self, other: TokenModel, share: float) -> TokenModel:
        return TokenModel((1 - share) * self.probs + share * other.probs)

    def joint(self, start: int) -> Floats:
        """Probabilities of the next two tokens: [vocab * vocab]."""
        return (self.probs[start][:, None] * self.probs).ravel()


def draw_by(weights: Floats, numbers: Floats) -> Ints:
    """Tokens by inverting the cumulative distribution: weights [n, vocab], numbers [n]."""
    cumulative = weights.cumsum(axis=1)
    return (cumulative <= (numbers * cumulative[:, -1])[:, None]).sum(axis=1).clip(max=weights.shape[1] - 1)


def verify_by_the_paper(
    p: Floats, q: Floats, drafts: Ints, pick: np.random.Generator, fault: str | None = None
) -> tuple[Ints, Ints]:
    """(accepted drafts, the token after them): p [n, k + 1, vocab], q [n, k, vocab], drafts [n, k]."""
    n, k = drafts.shape
    here = np.arange(n)
    chances = pick.random((n, k))
    p_x = np.take_along_axis(p[:, :k], drafts[:, :, None], 2)[:, :, 0]
    q_x = np.take_along_axis(q, drafts[:, :, None], 2)[:, :, 0]
    kept = chances <= np.minimum(1, q_x / p_x if fault == "accepts by q / p" else p_x / q_x)
    if fault == "accepts always":
        kept[:] = True
    counts = np.cumprod(kept, axis=1).sum(axis=1)
    rest = p[here, counts].copy()
    rejected = counts < k
    q_there = q[here, counts.clip(max=k - 1)]
    if fault == "replaces by q - p":
        rest[rejected] = np.maximum(q_there - rest, 0)[rejected]
    elif fault != "replaces by p":
        rest[rejected] = np.maximum(rest - q_there, 0)[rejected]
    if fault == "no bonus":
        rest[~rejected] = q[here, k - 1][~rejected]
    numbers = pick.random(n)
    if fault == "one number twice":
        numbers[rejected] = chances[here, counts.clip(max=k - 1)][rejected]
    return counts, draw_by(rest, numbers)


Verify = Callable[[Floats, Floats, Ints, Ints, int], tuple[Ints, Ints]]
"""(p, q, drafts, the sequences' seeds, output tokens before) to (accepted drafts, the token after them)."""


def two_tokens(target: TokenModel, drafter: TokenModel, start: int, n: int, k: int, verify: Verify, seed: int) -> Ints:
    """The first two tokens after `start` of n sequences that speculate with k drafts: [n, 2]."""
    pick = np.random.default_rng(seed)
    output = np.full((n, 2), -1)
    done = np.zeros(n, np.int64)
    last = np.full(n, start)
    while (waiting := np.flatnonzero(done < 2)).size:
        for before in np.unique(done[waiting]):
            rows = waiting[done[waiting] == before]
            context = last[rows]
            drafts, q, p = [], [], [target.probs[context]]
            for _ in range(k):
                q.append(drafter.probs[context])
                context = draw_by(q[-1], pick.random(len(rows)))
                drafts.append(context)
                p.append(target.probs[context])
            tokens = np.stack(drafts, 1)
            counts, following = verify(np.stack(p, 1), np.stack(q, 1), tokens, rows, int(before))
            made = np.concatenate([tokens, np.zeros((len(rows), 1), np.int64)], 1)
            made[np.arange(len(rows)), counts] = following
            for place in range(2 - before):
                here = counts >= place
                output[rows[here], before + place] = made[here, place]
            done[rows] = np.minimum(before + counts + 1, 2)
            last[rows] = following
            unfinished = rows[done[rows] < 2]
            last[unfinished] = output[unfinished, 0]
    return output


def chi_square(tokens: Ints, probs: Floats) -> tuple[float, float]:
    """(statistic, the value that it exceeds once in a million): tokens [n] against probabilities [kinds]."""
    expected = probs * len(tokens)
    seen = expected >= 5
    counts = np.bincount(tokens, minlength=len(probs))
    if not seen.all():  # rare kinds together
        expected = np.append(expected[seen], expected[~seen].sum())
        counts = np.append(counts[seen], counts[~seen].sum())
    wanted = expected > 0
    assert counts[~wanted].sum() == 0, "a token of probability 0"
    statistic = float(((counts[wanted] - expected[wanted]) ** 2 / expected[wanted]).sum())
    freedom = int(wanted.sum()) - 1
    # Wilson and Hilferty (1931); 4.753 is the normal deviate of 1e-6.
    limit = freedom * (1 - 2 / (9 * freedom) + 4.753 * np.sqrt(2 / (9 * freedom))) ** 3
    return statistic, float(limit)


def keys_of(n: int) -> torch.Tensor:
    return mix(torch.arange(n))


def to_torch(values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
