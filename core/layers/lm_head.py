"""From hidden states to logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.core.errors import ConfigError
from engine.core.layers.base import Layer
from engine.core.layers.embedding import Embedding, VocabParallelEmbedding
from engine.core.layers.matmul import multiply, pack
from engine.core.quant.base import TensorSpec

MOST_TOKENS = 2**24
"""Up to which float32 holds every whole number."""


class Head(Protocol):
    """What a model sees of its output layer."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden_size] -> logits [rows, vocab_size]."""

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row ([rows] float32, NaN if one is NaN) and its token ([rows] int64), the first of
        equals; with a NaN, some token. hidden: [rows, hidden_size]."""


class LMHead(Layer):
    """Multiplies by an embedding table: the model's own (tied) or one that is only the head's."""

    _weight: torch.Tensor

    def __init__(self, table: Embedding) -> None:
        """`table` is filled before the head."""
        self._table = table

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Head; logits of the tokens that the table has."""
        return multiply(hidden, self._weight)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Head; of the tokens that the table has, counted from its first."""
        peaks, tokens = self(hidden).max(dim=-1)
        return peaks.float(), tokens

    def tensors(self) -> Mapping[str, TensorSpec]:
        """None of its own."""
        return {}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Take over the table."""
        self._weight = pack(self._table.weight)

    @property
    def nbytes(self) -> int:
        """Bytes beyond those of the table."""
        filled = hasattr(self, "_weight") and self._weight is not self._table.weight
        return self._table.nbytes if filled else 0


class VocabParallelHead:
    """The head of ranks that share a vocabulary. All of them have the logits, or the likeliest token, of all of it."""

    def __init__(self, local: LMHead, table: VocabParallelEmbedding) -> None:
        """local: this rank's head, which multiplies by `table`. Raises ConfigError for too large a vocabulary."""
        self._local = local
        self._table = table
        self._group = table.group
        self._vocab_size = table.shape[0]
        if self._vocab_size > MOST_TOKENS:
            raise ConfigError(
                f"ranks share a vocabulary of {MOST_TOKENS} tokens at most; this one is {self._vocab_size}"
            )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Head."""
        logits, share = self._local(hidden), self._table.share
        if logits.shape[1] < share:
            logits = F.pad(logits, (0, share - logits.shape[1]))
        parts = list(self._group.all_gather(logits))
        parts[-1] = parts[-1][:, : self._vocab_size - share * (len(parts) - 1)]
        return torch.cat(parts, 1)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Head. A few bytes a row go round, as a sum to which each rank adds its own place: such a sum is exact,
        and there are fast kernels for it."""
        return self._choose(self._group.all_reduce(self._place(*self._local.greedy(hidden))))

    def _place(self, peaks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[ranks, rows, 2] float32: the rank's peaks and tokens in its place, zeros elsewhere."""
        placed = peaks.new_zeros((self._group.ranks, len(peaks), 2))
        torch.stack((peaks, (tokens + self._table.first).to(peaks.dtype)), 1, out=placed[self._group.rank])
        return placed

    def _choose(self, candidates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's peak and its token, the first of equals; candidates: [ranks, rows, 2], all places filled."""
        peaks, ranks = candidates[..., 0].max(0)
        return peaks, candidates[..., 1].gather(0, ranks[None])[0].long()
