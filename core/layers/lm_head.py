"""From hidden states to logits."""

import torch
import torch.nn.functional as F

from engine.core.layers.embedding import Embedding


class LMHead:
    """Multiplies by an embedding table: the model's own (tied) or one that is only the head's."""

    def __init__(self, table: Embedding) -> None:
        self._table = table

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden_size] -> [rows, vocab_size]."""
        return F.linear(hidden, self._table.weight)
