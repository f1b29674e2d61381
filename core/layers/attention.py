"""The attention layer: rotate, write to the cache, attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.core.layers.rotary import Angles, rotate

if TYPE_CHECKING:
    from engine.core.batch import ForwardPass


class Attention:
    """Attention of one layer; the backend that the pass brings does the work."""

    def __init__(self, layer: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """The numbers of heads are this rank's."""
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """qkv: [tokens, (heads + 2 * kv_heads) * head_dim] -> views qk: [tokens, heads + kv_heads, head_dim] and v."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        both = self.num_heads + self.num_kv_heads
        return heads.narrow(1, 0, both), heads.narrow(1, both, self.num_kv_heads)

    def __call__(self, run: ForwardPass, qk: torch.Tensor, v: torch.Tensor, angles: Angles) -> torch.Tensor:
        """qk: [tokens, heads + kv_heads, head_dim]; v: [tokens, kv_heads, head_dim] -> [tokens, heads * head_dim].

        Queries and keys come side by side so that one set of kernels rotates both.
        """
        qk = rotate(qk, angles)
        q, k = qk.narrow(1, 0, self.num_heads), qk.narrow(1, self.num_heads, self.num_kv_heads)
        run.pool.write(self.layer, k, v, run.batch.slots)
        return run.attention.forward(self.layer, q, k, v, run.plan).flatten(1)
