"""The classes that a LayerFactory makes layers of: by PyTorch operations here, by Triton kernels in fused.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen

from engine.core.distributed.rank_group import RankGroup
from engine.core.layers.activation import gated_activation
from engine.core.layers.attention import Attention
from engine.core.layers.embedding import Embedding, VocabParallelEmbedding
from engine.core.layers.experts import PlainExperts
from engine.core.layers.latent import LatentKeys
from engine.core.layers.linear import PlainKernel
from engine.core.layers.lm_head import Argmax, LMHead, VocabParallelHead, plain_argmax
from engine.core.layers.norm import RMSNorm
from engine.core.layers.rotary import Rotary, RotaryEmbedding, RotarySpec
from engine.core.layers.routing import Route, route
from engine.core.quant.base import Activation, LinearKernel, LinearSpec
from engine.core.quant.experts import ExpertsKernel, ExpertsSpec


@frozen(kw_only=True)
class LayerClasses:
    """The class, or a function that makes an instance, of every layer with a plain and a fused form."""

    linear_kernel: Callable[[LinearSpec], LinearKernel]
    """Kernel of a linear layer that the quantization method leaves unquantized."""
    experts_kernel: Callable[[ExpertsSpec], ExpertsKernel]
    """Kernel of experts that the quantization method leaves unquantized."""
    route: Route
    gated_activation: Callable[[Activation], Callable[[torch.Tensor], torch.Tensor]]
    """Called with the name of an activation: the function that activates a gated layer."""
    norm: Callable[..., RMSNorm]
    """Called with name, size, eps, dtype and group, and unit_offset by name."""
    rotary: Callable[[RotarySpec, str, str], RotaryEmbedding]
    """Called with spec, dtype and device."""
    attention: type[Attention]
    latent_keys: type[LatentKeys]
    vocab_parallel_embedding: type[VocabParallelEmbedding]
    lm_head: Callable[[Embedding], LMHead]
    vocab_parallel_head: type[VocabParallelHead]
    argmax: Argmax
    """Argmax of logits that are in memory."""


def _plain_norm(name: str, size: int, eps: float, dtype: str, group: RankGroup, *, unit_offset: bool) -> RMSNorm:
    """An RMSNorm, which needs no group: a PartialSum brings its own."""
    return RMSNorm(name, size, eps, dtype, unit_offset=unit_offset)


PLAIN = LayerClasses(
    linear_kernel=PlainKernel,
    experts_kernel=PlainExperts,
    route=route,
    gated_activation=gated_activation,
    norm=_plain_norm,
    rotary=Rotary,
    attention=Attention,
    latent_keys=LatentKeys,
    vocab_parallel_embedding=VocabParallelEmbedding,
    lm_head=LMHead,
    vocab_parallel_head=VocabParallelHead,
    argmax=plain_argmax,
)
