"""LayerFactory: makes the layers of a model, single and composite, for one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from engine.core.errors import ConfigError
from engine.core.layers.activation import ungated_activation
from engine.core.layers.blocks import (
    MLP,
    AttentionBlock,
    GatedMLP,
    NormedLinear,
    OutputProjection,
    ScaledPartialLinear,
    SplitOutput,
)
from engine.core.layers.head_norm import HeadNorm, ProjectionNorm, ProjectionPart
from engine.core.layers.hidden_states import StoringAttentionBlock, StoringNorm
from engine.core.layers.latent import LatentKeys
from engine.core.layers.linear import PartialLinear
from engine.core.layers.norm import LayerNorm, Norm, NormKind, ResidualAddition, RMSNorm
from engine.core.layers.single_layer_factory import SingleLayerFactory
from engine.core.layers.sparse_mlp import SparseMLP, SparseMLPSpec
from engine.core.quant.base import Activation


class LayerFactory(SingleLayerFactory):
    """Makes the layers of a model for one rank and records them for the loader. Names are those in the checkpoint.

    The model decides which layers it has. The factory decides their dtype, device, kernels and shards.
    """

    @overload
    def norm(self, name: str, size: int, eps: float) -> RMSNorm: ...

    @overload
    def norm(self, name: str, size: int, eps: float, kind: NormKind) -> Norm: ...

    def norm(self, name: str, size: int, eps: float, kind: NormKind = "rms") -> Norm:
        """A norm over the hidden size, after the residual addition. It reduces a partial sum."""
        if kind in ("layer", "layer_bias"):
            return self._record(LayerNorm(name, size, eps, self.dtype, bias=kind == "layer_bias"))
        made = self._classes.norm(
            f"{name}.weight", size, eps, self.dtype, self._group, unit_offset=kind == "rms_unit_offset"
        )
        return self._record(made)

    def final_norm(
        self, name: str, size: int, eps: float, kind: NormKind = "rms", *, num_layers: int
    ) -> Norm | StoringNorm:
        """The norm of what the last decoder layer returns, before the LM head.

        num_layers: number of decoder layers. A speculator may compute with the hidden states that enter this norm.
        """
        made = self.last_norm = self.norm(name, size, eps, kind)
        states = self.hidden_states
        return made if states is None or not states.has(num_layers) else StoringNorm(made, num_layers, states)

    def head_norm(
        self, parts: Sequence[tuple[str, int]], head_dim: int, eps: float, *, unit_offset: bool = False
    ) -> HeadNorm:
        """A norm over each head of queries and keys. parts: (name, this rank's heads).

        unit_offset: the checkpoint has the weights minus 1.
        """
        named = tuple((f"{name}.weight", heads) for name, heads in parts)
        return self._record(HeadNorm(named, head_dim, eps, self.dtype, unit_offset=unit_offset))

    def projection_norm(
        self, queries: str, keys: str, *, num_heads: int, num_kv_heads: int, head_dim: int, eps: float
    ) -> ProjectionNorm:
        """A norm over all heads of the queries, and one over all heads of the keys, of all ranks together.

        queries, keys: names. Numbers of heads are over all ranks.
        """
        parts = (
            ProjectionPart(name=f"{queries}.weight", heads=self.shard(num_heads, "query heads"), total_heads=num_heads),
            ProjectionPart(
                name=f"{keys}.weight",
                heads=self.shard_kv_heads(num_kv_heads),
                total_heads=num_kv_heads,
                replicas=self._shards.kv_replicas(num_kv_heads),
            ),
        )
        return self._record(ProjectionNorm(parts, head_dim, eps, self.dtype, self._group))

    def attention_block(
        self,
        layer: int,
        name: str,
        hidden_size: int,
        *,
        norm: str,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool | Literal["projection"] = False,
        sinks: bool = False,
        norm_kind: NormKind = "rms",
        output_norm: str = "",
        output_scale: float = 1.0,
        qkv: str = "",
        interleaved: bool = False,
    ) -> AttentionBlock | StoringAttentionBlock:
        """The attention block of decoder layer `layer`: input norm, projections, attention, output projection.

        name: of the attention module in the checkpoint, with q_proj, k_proj, v_proj and o_proj. norm: name of the input
        norm; empty: the block has none. eps: of all norms. qk_norm: whether queries and keys are normalized, by q_norm
        and k_norm of the module, each head for itself; "projection": all heads together. sinks: whether the module has
        a tensor sinks, of one attention sink per query head. norm_kind: of all norms. output_norm: name of a norm of
        the block's result, before the residual addition; empty: none. output_scale: factor on the result. qkv: name in
        the module of one tensor with the three projections, one after the other; empty: they are three tensors.
        interleaved: as in RotarySpec. Numbers of heads are over all ranks.
        """
        input_norm = self._input_norm(norm, hidden_size, eps, norm_kind)
        projections = self.qkv(
            (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
            hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=qkv_bias,
            stored=f"{name}.{qkv}" if qkv else "",
        )
        heads, kv_heads = self.shard(num_heads, "query heads"), self.shard_kv_heads(num_kv_heads)
        head_norm: HeadNorm | ProjectionNorm | None = None
        if qk_norm == "projection":
            head_norm = self.projection_norm(
                f"{name}.q_norm",
                f"{name}.k_norm",
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                eps=eps,
            )
        elif qk_norm:
            parts = [(f"{name}.q_norm", heads), (f"{name}.k_norm", kv_heads)]
            head_norm = self.head_norm(parts, head_dim, eps, unit_offset=norm_kind == "rms_unit_offset")
        attention = self.attention(
            layer,
            heads,
            kv_heads,
            head_dim,
            head_norm,
            name,
            sinks=f"{name}.sinks" if sinks else "",
            interleaved=interleaved,
        )
        output = self.partial_linear(f"{name}.o_proj", hidden_size, num_heads * head_dim, bias=output_bias)
        block = AttentionBlock(
            input_norm,
            projections,
            attention,
            self._output(output, hidden_size, eps, norm_kind, output_norm, output_scale, input_norm=norm),
        )
        states = self.hidden_states
        # Without any norm of its own, a block gets its input normed, as in layers of parallel attention and MLP.
        if states is None or not states.has(layer) or not (norm or output_norm):
            return block
        return StoringAttentionBlock(block, layer, states)

    def gated_mlp(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        norm: str,
        eps: float,
        bias: bool = False,
        activation: Activation = "silu",
        norm_kind: NormKind = "rms",
        output_norm: str = "",
        output_scale: float = 1.0,
        gate_up: str = "",
    ) -> GatedMLP:
        """The gated MLP of a decoder layer: input norm, then down(act(gate(x)) * up(x)).

        name: of the MLP module in the checkpoint, with gate_proj, up_proj and down_proj. gate_up: name in the module of
        one tensor with both projections, the gate first; empty: they are two tensors. The others are as in
        attention_block. Sizes are over all ranks.
        """
        input_norm = self._input_norm(norm, hidden_size, eps, norm_kind)
        parts = [(f"{name}.gate_proj", intermediate_size), (f"{name}.up_proj", intermediate_size)]
        gate_and_up = self.linear(
            parts,
            hidden_size,
            bias=bias,
            parallel="column",
            gated=True,
            activation=activation,
            stored=f"{name}.{gate_up}" if gate_up else "",
        )
        down = self.partial_linear(
            f"{name}.down_proj", hidden_size, intermediate_size, bias=bias, input_activation=activation
        )
        return GatedMLP(
            input_norm,
            gate_and_up,
            self._output(down, hidden_size, eps, norm_kind, output_norm, output_scale, input_norm=norm),
        )

    def latent_keys(self, norm: str, latent: int, rotated: int, eps: float) -> LatentKeys:
        """Completes queries and keys for a model's own layer with latent attention (MLA), and caches the keys.

        norm: name of the norm of the latent. latent, rotated: sizes of the two parts of a key.
        """
        return self._classes.latent_keys(self.norm(norm, latent, eps), latent, rotated)

    def sparse_mlp(self, spec: SparseMLPSpec) -> SparseMLP:
        """The mixture of experts of a decoder layer: input norm, router, experts, and perhaps a shared expert."""
        return SparseMLP.make(spec, self)

    def mlp(
        self,
        up: str,
        down: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        norm: str,
        eps: float,
        bias: bool = False,
        activation: Activation = "gelu_tanh",
        norm_kind: NormKind = "rms",
    ) -> MLP:
        """The MLP without gate of a decoder layer: input norm, then down(act(up(x))).

        up, down: names of the two linear layers. The others are as in gated_mlp.
        """
        input_norm = self._input_norm(norm, hidden_size, eps, norm_kind)
        first = self.linear([(up, intermediate_size)], hidden_size, bias=bias, parallel="column")
        last = self.partial_linear(down, hidden_size, intermediate_size, bias=bias)
        return MLP(
            input_norm,
            first,
            ungated_activation(activation),
            self._output(last, hidden_size, eps, norm_kind, "", 1.0, input_norm=norm),
        )

    def _input_norm(self, name: str, size: int, eps: float, kind: NormKind) -> Norm | ResidualAddition:
        return self.norm(name, size, eps, kind) if name else ResidualAddition()

    def _output(
        self,
        partial: PartialLinear,
        size: int,
        eps: float,
        kind: NormKind,
        norm: str,
        scale: float,
        *,
        input_norm: str,
    ) -> OutputProjection:
        """The last layer of a block, with the norm or the factor of its result."""
        if norm and scale != 1.0:
            raise ConfigError(f"a block has a norm of its result ({norm}) or a factor on the result, not both")
        if norm:
            return NormedLinear(partial, self.norm(norm, size, eps, kind))
        made = partial if scale == 1.0 else ScaledPartialLinear(partial.linear, self._group, scale)
        sums = self._group.overlapped_sums
        # A block without a norm gets its input normed, as in layers of parallel attention and MLP, whose sums are
        # reduced as one.
        if sums is None or not input_norm or not sums.supports(size, self.dtype):
            return made
        return SplitOutput(made, self._group, sums)
