"""Token embedding, whole or vocab-parallel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from attrs import evolve

from engine.core.distributed.rank_group import RankGroup
from engine.core.errors import ConfigError
from engine.core.layers.base import TensorLayer, torch_dtype
from engine.core.quant.base import TensorSpec

SHARD_MULTIPLE = 8
"""Tokens of a rank are a multiple of this where possible, so that each row of its logits is aligned to 16 bytes."""


class Embedding(TensorLayer):
    """One vector per token; weight: [rows, hidden_size]."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, dtype: str, *, scale: float = 1.0) -> None:
        """scale: factor on the vectors that calls return, rounded to the dtype. An output layer that multiplies by the
        table does not have it.
        """
        super().__init__(name, (vocab_size, hidden_size), dtype)
        self.scale = torch.tensor(scale, dtype=torch_dtype(dtype)).item()
        self.rows = vocab_size
        """Tokens whose vectors this rank holds."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [tokens] int64 -> [tokens, hidden_size]."""
        vectors = F.embedding(tokens, self.weight)
        return vectors if self.scale == 1.0 else vectors.mul_(self.scale)


class VocabParallelEmbedding(Embedding):
    """Each rank holds the vectors of a contiguous range of tokens; the last range may be shorter."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, dtype: str, group: RankGroup, *, scale: float = 1.0
    ) -> None:
        """Raises ConfigError if the vocabulary is too small to give every rank a token."""
        super().__init__(name, vocab_size, hidden_size, dtype, scale=scale)
        self.group = group
        self.shard_size = _shard_size(vocab_size, group.ranks)
        """Tokens per rank; the last rank may have fewer."""
        self.first_token = group.rank * self.shard_size
        self.rows = min(self.shard_size, vocab_size - self.first_token)
        if self.shard_size * (group.ranks - 1) >= vocab_size:
            raise ConfigError(f"{group.ranks} ranks cannot share a vocabulary of {vocab_size}; use fewer ranks")

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [tokens] int64 -> [tokens, hidden_size]."""
        vectors = self.group.all_reduce(self.look_up(tokens))
        return vectors if self.scale == 1.0 else vectors * self.scale

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's vectors, and zeros for tokens of other ranks."""
        rows = tokens - self.first_token
        elsewhere = (rows < 0) | (rows >= self.rows)
        return F.embedding(rows.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[:, None], 0.0)

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {name: evolve(spec, shard_dim=0, shard_size=self.shard_size) for name, spec in super().tensors().items()}


def _shard_size(vocab_size: int, ranks: int) -> int:
    """Tokens of every rank but the last: rounded up to SHARD_MULTIPLE if that leaves the last rank at least one."""
    even = -(-vocab_size // ranks)
    rounded = -(-even // SHARD_MULTIPLE) * SHARD_MULTIPLE
    return rounded if rounded * (ranks - 1) < vocab_size else even
