"""The layers of models: a model gets them from a LayerFactory, and the loader fills them with weights."""

from typing import TYPE_CHECKING

from engine.core.lazy import exports

if TYPE_CHECKING:
    from engine.core.layers.activation import (
        gated_activation as gated_activation,
        gelu_and_mul as gelu_and_mul,
        gelu_tanh_and_mul as gelu_tanh_and_mul,
        silu_and_mul as silu_and_mul,
        swiglu_oai_and_mul as swiglu_oai_and_mul,
    )
    from engine.core.layers.attention import Attention as Attention
    from engine.core.layers.base import (
        Layer as Layer,
        TensorLayer as TensorLayer,
        plain_tensor as plain_tensor,
        torch_dtype as torch_dtype,
    )
    from engine.core.layers.blocks import (
        AttentionBlock as AttentionBlock,
        GatedMLP as GatedMLP,
        OutputProjection as OutputProjection,
    )
    from engine.core.layers.embedding import Embedding as Embedding
    from engine.core.layers.expert_layers import ExpertLayers as ExpertLayers
    from engine.core.layers.expert_tensors import ExpertTensors as ExpertTensors
    from engine.core.layers.experts import (
        Experts as Experts,
        PlainExperts as PlainExperts,
        sum_of_experts as sum_of_experts,
    )
    from engine.core.layers.fused_experts import FusedExperts as FusedExperts
    from engine.core.layers.head_norm import HeadNorm as HeadNorm, ProjectionNorm as ProjectionNorm
    from engine.core.layers.latent import LatentKeys as LatentKeys
    from engine.core.layers.layer_factory import LayerFactory as LayerFactory
    from engine.core.layers.linear import (
        BIAS_SHARD_DIM as BIAS_SHARD_DIM,
        WEIGHT_SHARD_DIM as WEIGHT_SHARD_DIM,
        Linear as Linear,
        PartialLinear as PartialLinear,
        PlainKernel as PlainKernel,
    )
    from engine.core.layers.lm_head import LMHead as LMHead, OutputLayer as OutputLayer
    from engine.core.layers.matmul import (
        compiled_shapes as compiled_shapes,
        multiply as multiply,
        multiply_heads as multiply_heads,
        pack as pack,
    )
    from engine.core.layers.norm import LayerNorm as LayerNorm, NormKind as NormKind, RMSNorm as RMSNorm
    from engine.core.layers.rotary import (
        Angles as Angles,
        RotaryEmbedding as RotaryEmbedding,
        RotarySpec as RotarySpec,
        refuses_rope as refuses_rope,
        rotate as rotate,
        rotate_pairs as rotate_pairs,
        yarn_sharpness as yarn_sharpness,
    )
    from engine.core.layers.routing import Router as Router, RoutingSpec as RoutingSpec, route as route
    from engine.core.layers.skinny_linear import SkinnyGemm as SkinnyGemm, SkinnyGemms as SkinnyGemms
    from engine.core.layers.sparse_mlp import (
        SharedExpertSpec as SharedExpertSpec,
        SparseMLP as SparseMLP,
        SparseMLPSpec as SparseMLPSpec,
    )

__getattr__, __dir__, __all__ = exports(
    __name__,
    activation=(
        "gated_activation",
        "gelu_and_mul",
        "gelu_tanh_and_mul",
        "silu_and_mul",
        "swiglu_oai_and_mul",
    ),
    attention=("Attention",),
    base=(
        "Layer",
        "TensorLayer",
        "plain_tensor",
        "torch_dtype",
    ),
    blocks=(
        "AttentionBlock",
        "GatedMLP",
        "OutputProjection",
    ),
    embedding=("Embedding",),
    expert_layers=("ExpertLayers",),
    expert_tensors=("ExpertTensors",),
    experts=(
        "Experts",
        "PlainExperts",
        "sum_of_experts",
    ),
    fused_experts=("FusedExperts",),
    head_norm=(
        "HeadNorm",
        "ProjectionNorm",
    ),
    latent=("LatentKeys",),
    layer_factory=("LayerFactory",),
    linear=(
        "BIAS_SHARD_DIM",
        "Linear",
        "PartialLinear",
        "PlainKernel",
        "WEIGHT_SHARD_DIM",
    ),
    lm_head=(
        "LMHead",
        "OutputLayer",
    ),
    matmul=(
        "compiled_shapes",
        "multiply",
        "multiply_heads",
        "pack",
    ),
    norm=(
        "LayerNorm",
        "NormKind",
        "RMSNorm",
    ),
    routing=(
        "Router",
        "RoutingSpec",
        "route",
    ),
    rotary=(
        "Angles",
        "RotaryEmbedding",
        "RotarySpec",
        "refuses_rope",
        "rotate",
        "rotate_pairs",
        "yarn_sharpness",
    ),
    skinny_linear=("SkinnyGemm", "SkinnyGemms"),
    sparse_mlp=(
        "SharedExpertSpec",
        "SparseMLP",
        "SparseMLPSpec",
    ),
)
