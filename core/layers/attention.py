"""The attention layer: normalise heads, rotate, write to the cache, attend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.core.layers.rotary import Angles, rotate

if TYPE_CHECKING:
    from engine.core.layers.norm import HeadNorm
    from engine.core.models.forward_pass import ForwardPass


class Attention:
    """Attention of one layer; the backend that the pass brings does the work."""

    def __init__(
        self, layer: int, num_heads: int, num_kv_heads: int, head_dim: int, norm: HeadNorm | None = None
    ) -> None:
        """The numbers of heads are this rank's. norm: of queries and keys, before they are rotated."""
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.norm = norm

    def __call__(self, run: ForwardPass, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        """qkv: [tokens, (heads + 2 * kv_heads) * head_dim], queries, keys and values of this rank side by side.

        Returns [tokens, heads * head_dim]. `qkv` may be overwritten.
        """
        q, k, v = self._project(run, qkv, angles)
        return run.attention.forward(self.layer, q, k, v, run.plan).flatten(1)

    def _project(
        self, run: ForwardPass, qkv: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalise and rotate, and write to the cache; returns what the backend's `forward` takes."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        both = self.num_heads + self.num_kv_heads
        qk = heads.narrow(1, 0, both)  # side by side, so that one set of operations serves both
        if self.norm is not None:
            qk = self.norm(qk)
        qk = rotate(qk, angles)
        q, k = qk.narrow(1, 0, self.num_heads), qk.narrow(1, self.num_heads, self.num_kv_heads)
        v = heads.narrow(1, both, self.num_kv_heads)
        run.pool.write(self.layer, k, v, run.batch.slots)
        return q, k, v
