"""The attention layer: norm of heads, rotary embedding, write to the KV cache, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.core.layers.rotary import Angles, rotate, rotate_interleaved

if TYPE_CHECKING:
    from engine.core.layers.head_norm import HeadNorm, ProjectionNorm
    from engine.core.models.forward_pass import ForwardPass


class Attention:
    """Attention of one decoder layer, computed by the backend of the forward pass."""

    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: HeadNorm | ProjectionNorm | None = None,
        *,
        interleaved: bool = False,
        ranks: int = 1,
    ) -> None:
        """Numbers of heads are this rank's. norm: of the heads of queries and keys, before the rotary embedding.
        interleaved: as in RotarySpec. ranks: number of ranks that share the model's heads.
        """
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.norm = norm
        self.interleaved = interleaved
        self.ranks = ranks

    def __call__(self, run: ForwardPass, qkv: torch.Tensor, angles: Angles | None) -> torch.Tensor:
        """Write keys and values to the KV cache and attend. Returns [tokens, heads * head_dim].

        qkv: [tokens, (heads + 2 * kv_heads) * head_dim], this rank's queries, keys and values concatenated; may be
        overwritten. angles: None: queries and keys are not rotated.
        """
        q, k, v = self._project(run, qkv, angles if angles is None else angles[:2])
        if angles is not None and len(angles) > 2:
            q.mul_(angles[2])
        return run.attention.forward(self.layer, q, k, v, run.plan).flatten(1)

    def _project(
        self, run: ForwardPass, qkv: torch.Tensor, angles: Angles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm and rotation of heads, and the write to the cache. Returns q, k, v: [tokens, heads, head_dim]."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        num_qk = self.num_heads + self.num_kv_heads
        qk = heads.narrow(1, 0, num_qk)  # one tensor, so that one set of operations serves queries and keys
        if self.norm is not None:
            qk = self.norm(qk)
        if angles is not None:
            qk = rotate_interleaved(qk, angles) if self.interleaved else rotate(qk, angles)
        q, k = qk.narrow(1, 0, self.num_heads), qk.narrow(1, self.num_heads, self.num_kv_heads)
        v = heads.narrow(1, num_qk, self.num_kv_heads)
        run.pool.write(self.layer, k, v, run.batch.slots)
        return q, k, v


class GroupedAttention:
    """Attention of one decoder layer in a model of several cache groups."""

    def __init__(self, attention: Attention, group: int) -> None:
        """attention: of the layer, numbered by its index in the group."""
        self._attention = attention
        self._group = group

    def __call__(self, run: ForwardPass, qkv: torch.Tensor, angles: Angles | None) -> torch.Tensor:
        """Attend with the cache and the backend of the group; arguments and result are Attention's."""
        return self._attention(run.of_group(self._group), qkv, angles)
