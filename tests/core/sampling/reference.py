"""A reference sampler by loops over float64, and helpers to run the real one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.sampling.sampler import Sampler
from engine.core.types import NewSequence, SamplingParams

VOCAB = 50
EOS = 7
WORD = 2**64


def reference_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % WORD
    return x ^ (x >> 31)


def reference_uniform(seed: int, position: int) -> float:
    return (reference_mix((reference_mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) % WORD) >> 11) * 2.0**-53


def reference_probs(
    logits: npt.NDArray[Any], params: SamplingParams, prompt: list[int], output: list[int]
) -> npt.NDArray[Any]:
    """The distribution a token is drawn from, by loops over float64; logits: [vocab] numpy."""
    scores = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias:
        scores[token] += bias
    if len(output) < params.min_tokens:
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        scores[sorted(ends)] = -np.inf
    for token in set(prompt) | set(output):
        scores[token] *= params.repetition_penalty if scores[token] <= 0 else 1 / params.repetition_penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature == 0:
        return np.eye(len(scores))[int(scores.argmax())]
    scores /= params.temperature
    order = np.argsort(-scores, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    probs = np.exp(scores[kept] - scores[kept].max())
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    size = max(1, int((before < params.top_p).sum())) if params.top_p < 1 else len(kept)
    kept, probs = kept[:size], probs[:size]
    full = np.zeros(len(scores))
    chosen = probs >= params.min_p * probs.max()
    full[kept[chosen]] = probs[chosen] / probs[chosen].sum()
    return full


def reference_token(probs: npt.NDArray[Any], uniform: float) -> tuple[int, bool]:
    """(token, whether rounding can change the token)."""
    cumulative = np.cumsum(probs)
    token = int((cumulative <= uniform * cumulative[-1]).sum())
    return token, float(np.abs(cumulative - uniform).min()) < 1e-5


def make_sampler(
    *params: SamplingParams,
    vocab: int = VOCAB,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    fused: bool = False,
) -> Sampler:
    sampler = Sampler(vocab, "cpu", frozenset({EOS}), max_running=max(len(params), 1), fused=fused)
    for number, each in enumerate(params):
        new = NewSequence(sequence=number, tokens=(*prompt, *output), prompt_len=len(prompt), params=each)
        sampler.add(new, table_row=number)
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, sequences: Sequence[int]) -> SampledTokens:
    """Sample; each sequence has the table row of its own number."""
    return sampler.sample(logits, sequences, torch.tensor(list(sequences), dtype=torch.int64))


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def run(sampler: Sampler, logits: torch.Tensor, sequences: Sequence[int], steps: int) -> list[list[int]]:
    """Tokens sampled in `steps` steps from the same logits: one list per row."""
    columns = [sample(sampler, logits, sequences).to_host()[0] for _ in range(steps)]
    return [list(row) for row in zip(*columns, strict=True)]


EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "logit_bias": ((4, 2.0), (9, -50.0)),
    "min_tokens": 5,
    "stop_token_ids": (11, 13),
}
ALONE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": VOCAB - 1},
    {"top_k": VOCAB + 100},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.5},
    {"logit_bias": ((4, 3.0), (9, -100.0))},
    {"min_tokens": 10, "stop_token_ids": (11,)},
    {"min_tokens": 10, "ignore_eos": True},
    {"top_k": 10, "top_p": 0.7},
    EVERYTHING,
    {**EVERYTHING, "temperature": 0.0},
]
