"""Which class makes each layer: here those of PyTorch operations; fused.py has the others."""

from __future__ import annotations

import torch

from engine.core.distributed.rank_group import RankGroup
from engine.core.layers.activation import silu_and_mul
from engine.core.layers.attention import Attention
from engine.core.layers.embedding import Embedding, SharedEmbedding
from engine.core.layers.linear import PlainKernel
from engine.core.layers.lm_head import Head, LMHead, SharedHead
from engine.core.layers.norm import HeadNorm, RMSNorm
from engine.core.layers.rotary import Rotary, RotaryEmbedding, RotarySpec
from engine.core.quant.base import LinearKernel, LinearSpec


class PlainLayers:
    """Layers by PyTorch operations."""

    def __init__(self, dtype: str, device: str) -> None:
        self.dtype = dtype
        self.device = device

    def kernel(self, spec: LinearSpec) -> LinearKernel:
        """Of a linear layer that no quantization method claims."""
        return PlainKernel(spec)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """See silu_and_mul."""
        return silu_and_mul(x)

    def shared_embedding(self, name: str, vocab_size: int, hidden_size: int, group: RankGroup) -> SharedEmbedding:
        """See SharedEmbedding."""
        return SharedEmbedding(name, vocab_size, hidden_size, self.dtype, group)

    def lm_head(self, table: Embedding) -> LMHead:
        """See LMHead."""
        return LMHead(table)

    def shared_head(self, local: LMHead, table: SharedEmbedding) -> Head:
        """See SharedHead."""
        return SharedHead(local, table)

    def norm(self, name: str, size: int, eps: float, group: RankGroup) -> RMSNorm:
        """See RMSNorm."""
        return RMSNorm(name, size, eps, self.dtype)

    def rotary(self, spec: RotarySpec) -> RotaryEmbedding:
        """See Rotary."""
        return Rotary(spec, self.dtype, self.device)

    def attention(
        self, layer: int, num_heads: int, num_kv_heads: int, head_dim: int, norm: HeadNorm | None
    ) -> Attention:
        """See Attention."""
        return Attention(layer, num_heads, num_kv_heads, head_dim, norm)
