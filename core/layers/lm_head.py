"""From hidden states to logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.core.layers.base import Layer
from engine.core.layers.embedding import Embedding
from engine.core.layers.matmul import multiply, pack
from engine.core.quant import TensorSpec


class LMHead(Layer):
    """Multiplies by an embedding table: the model's own (tied) or one that is only the head's."""

    _weight: torch.Tensor

    def __init__(self, table: Embedding) -> None:
        """`table` is filled before the head."""
        self._table = table

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden_size] -> [rows, vocab_size]."""
        return multiply(hidden, self._weight)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row ([rows] float32, NaN if one is NaN) and its token ([rows] int64), the first of
        equals; with a NaN, some token. hidden: [rows, hidden_size]."""
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
