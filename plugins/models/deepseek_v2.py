"""DeepSeek-V2-Lite (arXiv:2405.04434): multi-head latent attention (MLA), experts, and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import asdict, evolve, frozen

from engine.core.errors import CheckpointError
from engine.core.layers import (
    Layer,
    LayerFactory,
    Linear,
    RoutingSpec,
    compiled_shapes,
    multiply_heads,
    yarn_sharpness,
)
from engine.core.models import KVShape, ModelSpec
from engine.core.weights import read_key
from engine.plugins.models.config_keys import ConfigKeys
from engine.plugins.models.decoder import Block, Decoder
from engine.plugins.models.decoder_config import DecoderConfig, parse_decoder
from engine.plugins.models.sparse import TRAINING_KEYS, SparseConfig

if TYPE_CHECKING:
    from engine.core.distributed import PartialSum
    from engine.core.layers import Angles
    from engine.core.models import ForwardPass
    from engine.core.quant import TensorSpec

LATENT_EPS = 1e-6
"""Epsilon of the latent's norm, which is no key of config.json."""


@frozen(kw_only=True)
class LatentConfig(DecoderConfig):
    """A decoder with multi-head latent attention, whose `head_dim` is the size of a cached key."""

    latent: int
    """Size of the latent, of which a head's key and value are linear functions. First part of a cached key."""
    rotated: int
    """Size of the key that is rotated, and that all heads share. Second part of a cached key."""
    unrotated: int
    """Size of a head's key that is computed from the latent."""
    value: int
    """Size of a head's value."""


class DeepseekV2(Decoder):
    """The decoder with latent attention without a compressed query, dense first layers, and experts in the others."""

    architecture: ClassVar[str] = "DeepseekV2ForCausalLM"
    model_type: ClassVar[str] = "deepseek_v2"
    keys: ClassVar[ConfigKeys] = (
        ConfigKeys()
        .reading("first_k_dense_replace", "kv_lora_rank", "moe_intermediate_size", "n_routed_experts")
        .reading("n_shared_experts", "num_experts_per_tok", "q_lora_rank", "routed_scaling_factor", "v_head_dim")
        .reading("qk_nope_head_dim", "qk_rope_head_dim", nullable=("q_lora_rank",))
        .accepting(attention_bias=(False,), mlp_bias=(False,), moe_layer_freq=(1,), norm_topk_prob=(False, None))
        .accepting(scoring_func=("softmax",), topk_method=("greedy",))
        .ignoring(*TRAINING_KEYS, "aux_loss_alpha", "seq_aux")
        .ignoring("ep_size", "head_dim", "n_group", "qk_head_dim", "topk_group")
    )

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        refusal = super().refuses(config)
        if refusal is None and config.get("q_lora_rank", 1536) is not None:
            return "config.json does not have q_lora_rank: null; queries from a latent (DeepSeek-V2) are not computed"
        return refusal

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> LatentConfig:
        latent, rotated, unrotated, value = (
            read_key(config, key, int, least=1)
            for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        shape = parse_decoder({**config, "head_dim": rotated}, interleaved=True)
        if shape.num_kv_heads != shape.num_heads:
            raise CheckpointError("config.json: num_key_value_heads must be num_attention_heads with latent attention")
        size = read_key(config, "moe_intermediate_size", int, least=1)
        dense = read_key(config, "first_k_dense_replace", int, 0)
        sparse = SparseConfig(
            layers=frozenset(range(dense, shape.num_layers)),
            routing=RoutingSpec(
                num_experts=read_key(config, "n_routed_experts", int, least=1),
                top_k=read_key(config, "num_experts_per_tok", int, least=1),
                renormalize=False,
                scale=read_key(config, "routed_scaling_factor", float, 1.0),
            ),
            intermediate_size=size,
            activation=shape.activation,
            shared="shared_experts",
            shared_gate="",
            shared_intermediate_size=size * read_key(config, "n_shared_experts", int, 2, least=1),
        )
        found = evolve(
            shape,
            num_kv_heads=1,
            head_dim=latent + rotated,
            scale=(unrotated + rotated) ** -0.5 * yarn_sharpness(shape.ropes[0]) ** 2,
            sparse=sparse,
        )
        own = asdict(found, recurse=False)
        return LatentConfig(**own, latent=latent, rotated=rotated, unrotated=unrotated, value=value)

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        shape = cls.parse(cls.normalized(config))
        cache = KVShape(
            num_heads=shape.num_heads,
            num_kv_heads=1,
            head_dim=shape.head_dim,
            value_head_dim=shape.latent,
            latent=True,
        )
        return evolve(super().spec(config), layer_caches=(cache,) * shape.num_layers)

    @classmethod
    def block(cls, index: int, shape: DecoderConfig, layers: LayerFactory) -> Block:
        assert isinstance(shape, LatentConfig)
        attention, mlp = LatentAttention(index, shape, layers), cls.mlp(index, shape, layers)

        def block(
            run: ForwardPass,
            hidden: torch.Tensor | PartialSum,
            residual: torch.Tensor | None,
            angles: Angles | None,
        ) -> tuple[torch.Tensor | PartialSum, torch.Tensor]:
            assert angles is not None
            return mlp(*attention(run, hidden, residual, angles))

        return block


class LatentAttention:
    """The attention block of one layer. It attends to latents: the maps from a latent to a head's key and to its value
    are applied to the query and to the result instead ("absorbed")."""

    def __init__(self, index: int, shape: LatentConfig, layers: LayerFactory) -> None:
        layer, hidden = f"{shape.prefix}layers.{index}", shape.hidden_size
        name, heads = f"{layer}.self_attn", shape.num_heads
        self.sizes = shape
        self.place = layers.cache_place(index)
        self.norm = layers.norm(f"{layer}.{shape.norms.attention}", hidden, shape.norm_eps)
        self.queries = layers.linear(
            [(f"{name}.q_proj", heads * (shape.unrotated + shape.rotated))], hidden, parallel="column"
        )
        self.latent = layers.linear([(f"{name}.kv_a_proj_with_mqa", shape.latent + shape.rotated)], hidden)
        self.keys = layers.latent_keys(f"{name}.kv_a_layernorm", shape.latent, shape.rotated, LATENT_EPS)
        expand = layers.linear(
            [(f"{name}.kv_b_proj", heads * (shape.unrotated + shape.value))],
            shape.latent,
            parallel="column",
            exact_input=True,
        )
        self.heads = HeadMatrices(expand, shape, layers)
        layers.layers.append(self.heads)  # after `expand`, from whose weights it is filled
        self.output = layers.partial_linear(f"{name}.o_proj", hidden, heads * shape.value)

    def __call__(
        self, run: ForwardPass, hidden: torch.Tensor | PartialSum, residual: torch.Tensor | None, angles: Angles
    ) -> tuple[PartialSum, torch.Tensor]:
        """As an AttentionBlock."""
        sizes, (group, index) = self.sizes, self.place
        x, residual = self.norm(hidden, residual)
        queries = self.queries(x).view(x.shape[0], -1, sizes.unrotated + sizes.rotated)
        unrotated, rotated = torch.split(queries, [sizes.unrotated, sizes.rotated], -1)
        own = run.of_group(group)
        q = queries.new_empty(*queries.shape[:2], sizes.head_dim)
        multiply_heads(unrotated, self.heads.keys, q[..., : sizes.latent])
        k = self.keys(own, index, q, rotated, self.latent(x), angles)
        attended = own.attention.forward(index, q, k, k[..., : sizes.latent], own.plan)
        values = attended.new_empty(*attended.shape[:2], sizes.value)
        multiply_heads(attended, self.heads.values, values)
        return self.output(values.flatten(1)), residual


class HeadMatrices(Layer):
    """The matrices from a latent to the key and to the value of each of this rank's heads, dequantized."""

    keys: torch.Tensor
    """[heads, unrotated, latent]."""
    values: torch.Tensor
    """[heads, latent, value]."""

    def __init__(self, linear: Linear, sizes: LatentConfig, layers: LayerFactory) -> None:
        """linear: from a latent to the keys and values of all heads. It must be filled before."""
        self._linear = linear
        self._sizes = sizes
        self._identity = {"dtype": getattr(torch, layers.dtype), "device": layers.device}

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Apply the linear layer to the identity, so that any quantization method serves."""
        sizes = self._sizes
        both = self._linear(torch.eye(sizes.latent, **self._identity)).T
        per_head = both.view(-1, sizes.unrotated + sizes.value, sizes.latent)
        keys, values = torch.split(per_head, [sizes.unrotated, sizes.value], 1)
        self.keys, self.values = keys.contiguous(), values.transpose(1, 2).contiguous()

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes if hasattr(self, "keys") else 0

    @property
    def packed_shapes(self) -> frozenset[tuple[int, ...]]:
        return compiled_shapes(self.keys, self.values)
