"""Token embedding."""

import torch
import torch.nn.functional as F

from engine.core.layers.base import TensorLayer


class Embedding(TensorLayer):
    """One vector a token; weight: [vocab_size, hidden_size]."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [tokens] int64 -> [tokens, hidden_size]."""
        return F.embedding(tokens, self.weight)
