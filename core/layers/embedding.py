"""Token embedding, whole or shared by ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from attrs import evolve

from engine.core.distributed.rank_group import RankGroup
from engine.core.errors import ConfigError
from engine.core.layers.base import TensorLayer
from engine.core.quant.base import TensorSpec

SHARE_MULTIPLE = 8
"""Rows of a rank's share are a multiple of it where they can be, so that its rows of logits begin at 16 bytes."""


class Embedding(TensorLayer):
    """One vector a token; weight: [rows, hidden_size]."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, dtype: str) -> None:
        super().__init__(name, (vocab_size, hidden_size), dtype)
        self.rows = vocab_size
        """Tokens that this rank has the vectors of."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [tokens] int64 -> [tokens, hidden_size]."""
        return F.embedding(tokens, self.weight)


class VocabParallelEmbedding(Embedding):
    """Each rank has the vectors of some tokens, side by side in the vocabulary; the last one may have fewer."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, dtype: str, group: RankGroup) -> None:
        """Raises ConfigError for a vocabulary so small that a rank would have no token."""
        super().__init__(name, vocab_size, hidden_size, dtype)
        self.group = group
        self.share = _share(vocab_size, group.ranks)
        """Tokens of each rank but the last."""
        self.first = group.rank * self.share
        """This rank's first token."""
        self.rows = min(self.share, vocab_size - self.first)
        if self.share * (group.ranks - 1) >= vocab_size:
            raise ConfigError(f"{group.ranks} ranks cannot share a vocabulary of {vocab_size}; use fewer ranks")

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [tokens] int64 -> [tokens, hidden_size]."""
        return self.group.all_reduce(self.look_up(tokens))

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """The vectors that this rank has, and zeros."""
        places = tokens - self.first
        elsewhere = (places < 0) | (places >= self.rows)
        return F.embedding(places.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[:, None], 0.0)

    def tensors(self) -> Mapping[str, TensorSpec]:
        """The rank's rows of the one tensor."""
        return {name: evolve(spec, shard_dim=0, shard_size=self.share) for name, spec in super().tensors().items()}


def _share(vocab_size: int, ranks: int) -> int:
    """Tokens of each rank but the last, for which something should be left."""
    even = -(-vocab_size // ranks)
    rounded = -(-even // SHARE_MULTIPLE) * SHARE_MULTIPLE
    return rounded if rounded * (ranks - 1) < vocab_size else even
