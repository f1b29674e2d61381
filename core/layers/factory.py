"""LayerFactory: makes the layers of a model, for one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from engine.core.distributed.rank_group import OneRank, RankGroup
from engine.core.errors import ConfigError, near_misses
from engine.core.layers.attention import Attention
from engine.core.layers.base import Layer, torch_dtype
from engine.core.layers.blocks import AttentionBlock, GatedMLP
from engine.core.layers.embedding import Embedding, VocabParallelEmbedding
from engine.core.layers.kv_scale_reader import KVScaleReader
from engine.core.layers.layer_classes import PLAIN
from engine.core.layers.linear import Linear, PartialLinear
from engine.core.layers.lm_head import OutputLayer
from engine.core.layers.norm import HeadNorm, RMSNorm
from engine.core.layers.rotary import RotaryEmbedding, RotarySpec
from engine.core.layers.sinks import SinkReader
from engine.core.plugin_host.faults import blame, expect
from engine.core.quant.base import (
    ACTIVATIONS,
    Activation,
    KVScaleNames,
    LinearKernel,
    LinearPart,
    LinearSpec,
    Parallel,
    QuantMethod,
)

L = TypeVar("L", bound=Layer)


class LayerFactory:
    """Makes the layers of a model for one rank and records them for the loader. Names are those in the checkpoint.

    The model decides which layers it has. The factory decides their dtype, device, kernels and shards.
    """

    def __init__(
        self,
        *,
        dtype: str,
        device: str,
        quant: QuantMethod[Any] | None = None,
        group: RankGroup | None = None,
        fused: bool = False,
        owners: Mapping[str, str] = {},
    ) -> None:
        """group: the ranks that share the model; None: a single rank. fused: use Triton kernels (fused.py) where they
        exist. owners: extension point (quant, models) -> how errors name its plugin.
        """
        torch_dtype(dtype)
        self.model_owner = owners.get("models", "the model")
        """How errors name the plugin of the model."""
        self._quant_owner = owners.get("quant", "the quantization method")
        self.dtype = dtype
        self.device = device
        self._group = group or OneRank()
        self.rank = self._group.rank
        self.ranks = self._group.ranks
        self.layers: list[Layer] = []
        self.ignored: list[str] = []
        self.tied: dict[str, str] = {}
        """Tensors that are not read -> tensors that are used instead, and that they must equal."""
        if quant is not None:
            with blame(self._quant_owner, "ignored()"):
                ignored = quant.ignored()
                right = not isinstance(ignored, str) and all(isinstance(one, str) for one in ignored)
            expect(right, self._quant_owner, "ignored()", ignored, "a sequence of patterns")
            self.ignored += ignored
        self.kv_scales: list[KVScaleReader] = []
        """Readers of the KV scales that the checkpoint may have."""
        self.sinks: list[SinkReader] = []
        """Readers of the attention sinks of layers that have them."""
        self._quant = quant
        self._classes = PLAIN
        if fused:  # imported here: it imports Triton
            from engine.core.layers.fused import fused_classes

            self._classes = fused_classes(dtype, device)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on this rank."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def packed_shapes(self) -> frozenset[tuple[int, ...]]:
        """Different shapes of all packed weights; see `Layer.packed_shapes`."""
        return frozenset[tuple[int, ...]]().union(*(layer.packed_shapes for layer in self.layers))

    def ignore(self, pattern: str) -> None:
        """Allow the checkpoint to have tensors whose names match (fnmatch: `*.name`) and that are not read."""
        self.ignored.append(pattern)

    def shard(self, total: int, what: str) -> int:
        """This rank's shard of `total`. Raises ConfigError, naming `what`, if the ranks do not divide it evenly."""
        if total % self.ranks:
            raise ConfigError(f"{self.ranks} ranks cannot share {total} {what} evenly; use a number that divides it")
        return total // self.ranks

    share = shard
    """The former name of `shard`, kept for older plugins."""

    def shard_kv_heads(self, total: int) -> int:
        """This rank's number of KV heads, of `total`. With more ranks than heads, adjacent ranks hold replicas of one.

        Raises ConfigError if neither number divides the other.
        """
        return self.shard(total * self._replicas(total), "key and value heads")

    share_kv = shard_kv_heads
    """The former name of `shard_kv_heads`, kept for older plugins."""

    def qkv(
        self,
        names: tuple[str, str, str],
        in_features: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
    ) -> Linear:
        """The projections to queries, keys and values as one layer, column-parallel by heads.

        names: of the three projections in the checkpoint. Numbers of heads are over all ranks.
        """
        self.shard(num_heads, "query heads")
        self.shard_kv_heads(num_kv_heads)
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        return self._linear(
            tuple(
                LinearPart(name=name, out_features=outputs, replicas=replicas)
                for name, outputs, replicas in zip(
                    names, (queries, keys, keys), (1, *[self._replicas(num_kv_heads)] * 2), strict=True
                )
            ),
            in_features,
            bias=bias,
            parallel="column",
        )

    def linear(
        self,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool = False,
        parallel: Parallel = "none",
        gated: bool = False,
        activation: Activation = "silu",
    ) -> Linear:
        """A linear layer.

        parts: (name, outputs) of each of the checkpoint's layers to merge; their outputs are concatenated.
        parallel: column (a rank has some outputs of each part), row (some inputs; the results are summed over
            the ranks) or none.
        gated: the parts are gate and up projections of one size; call the layer by `gated` or `gated_quantized_for`.
        activation: of the gate of a gated layer.
        Sizes are over all ranks.
        """
        if parallel == "column":
            for name, outputs in parts:
                self.shard(outputs, f"outputs of {name}")
        if parallel == "row":
            self.shard(in_features, f"inputs of {parts[0][0]}")
        made = tuple(LinearPart(name=name, out_features=outputs) for name, outputs in parts)
        return self._linear(made, in_features, bias=bias, parallel=parallel, gated=gated, activation=activation)

    def partial_linear(
        self,
        name: str,
        out_features: int,
        in_features: int,
        *,
        bias: bool = False,
        input_activation: Activation = "silu",
    ) -> PartialLinear:
        """A row-parallel linear layer that leaves the reduction to the next norm. Sizes are over all ranks.

        input_activation: of the gated layer whose result is the input, if that is one.
        """
        self.shard(in_features, f"inputs of {name}")
        part = LinearPart(name=name, out_features=out_features)
        linear = self._linear(
            (part,), in_features, bias=bias, parallel="row", reduces=False, input_activation=input_activation
        )
        return PartialLinear(linear, self._group)

    def _linear(
        self,
        parts: tuple[LinearPart, ...],
        in_features: int,
        *,
        bias: bool,
        parallel: Parallel,
        gated: bool = False,
        reduces: bool = True,
        activation: Activation = "silu",
        input_activation: Activation = "silu",
    ) -> Linear:
        if activation not in ACTIVATIONS:
            raise ConfigError(f"the activation {activation!r} is not known; {near_misses(activation, ACTIVATIONS)}")
        spec = LinearSpec(
            parts=parts,
            in_features=in_features,
            bias=bias,
            dtype=self.dtype,
            device=self.device,
            parallel=parallel,
            gated=gated,
            activation=activation,
            input_activation=input_activation,
            ranks=self.ranks,
        )
        kernel = None
        if self._quant is not None:
            with blame(self._quant_owner, f"linear() of {parts[0].name}"):
                kernel = self._quant.linear(spec)
            right = kernel is None or isinstance(kernel, LinearKernel)
            expect(right, self._quant_owner, f"linear() of {parts[0].name}", kernel, "a LinearKernel or None")
        is_split_by_inputs = parallel == "row" and self.ranks > 1
        return self._record(
            Linear(
                spec,
                kernel or self._classes.linear_kernel(spec),
                self._group.all_reduce if is_split_by_inputs and reduces else None,
                self._classes.gated_activation(activation),
                adds_bias=reduces or not is_split_by_inputs or self.rank == 0,
                owner=self._quant_owner,
            )
        )

    def _replicas(self, num_kv_heads: int) -> int:
        """Number of ranks that hold the same KV heads."""
        return self.ranks // num_kv_heads if self.ranks > num_kv_heads and self.ranks % num_kv_heads == 0 else 1

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """The token embedding, vocab-parallel on several ranks."""
        weight = f"{name}.weight"
        if self.ranks == 1:
            return self._record(Embedding(weight, vocab_size, hidden_size, self.dtype))
        return self._record(
            self._classes.vocab_parallel_embedding(weight, vocab_size, hidden_size, self.dtype, self._group)
        )

    def lm_head(self, name: str, vocab_size: int, hidden_size: int, tied: Embedding | None = None) -> OutputLayer:
        """The output layer. With `tied` it multiplies by that embedding, and a copy in the checkpoint must equal it."""
        if tied is not None:
            self.ignore(f"{name}.weight")
            self.tied[f"{name}.weight"] = next(iter(tied.tensors()))
        table = tied or self.embedding(name, vocab_size, hidden_size)
        head = self._record(self._classes.lm_head(table))
        return self._classes.vocab_parallel_head(head, table) if isinstance(table, VocabParallelEmbedding) else head

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """A norm over the hidden size, after the residual addition. It reduces a partial sum."""
        return self._record(self._classes.norm(f"{name}.weight", size, eps, self.dtype, self._group))

    def head_norm(self, parts: Sequence[tuple[str, int]], head_dim: int, eps: float) -> HeadNorm:
        """A norm over each head of queries and keys. parts: (name, this rank's heads)."""
        named = tuple((f"{name}.weight", heads) for name, heads in parts)
        return self._record(HeadNorm(named, head_dim, eps, self.dtype))

    def rotary(self, spec: RotarySpec) -> RotaryEmbedding:
        """A rotary embedding. Frequencies stored in older checkpoints are not read."""
        self.ignore("*.rotary_emb.inv_freq")
        return self._classes.rotary(spec, self.dtype, self.device)

    def attention(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: HeadNorm | None = None,
        name: str = "",
        *,
        sinks: str = "",
    ) -> Attention:
        """Attention of one decoder layer. Numbers of heads are this rank's.

        norm: of the heads of queries and keys. name: of the module in the checkpoint, to read KV scales by; without a
        name they are not read. sinks: name of the tensor with an attention sink per query head, if the layer has sinks
        (`ModelSpec.sinks` says so too).
        """
        names = None
        if self._quant is not None and name:
            with blame(self._quant_owner, "kv_scales()"):
                names = self._quant.kv_scales(name)
            right = names is None or isinstance(names, KVScaleNames)
            expect(right, self._quant_owner, "kv_scales()", names, "a KVScaleNames or None")
        if names is not None:
            self.kv_scales.append(self._record(KVScaleReader(layer, names)))
        if sinks:
            self.sinks.append(self._record(SinkReader(layer, sinks, num_heads * self.ranks, self.dtype)))
        return self._classes.attention(layer, num_heads, num_kv_heads, head_dim, norm)

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
        qk_norm: bool = False,
        sinks: bool = False,
    ) -> AttentionBlock:
        """The attention block of decoder layer `layer`: input norm, projections, attention, output projection.

        name: of the attention module in the checkpoint, with q_proj, k_proj, v_proj and o_proj. norm: name of the input
        norm. eps: of all norms. qk_norm: whether heads of queries and keys are normalized, by q_norm and k_norm of the
        module. sinks: whether the module has a tensor sinks, of one attention sink per query head. Numbers of heads are
        over all ranks.
        """
        input_norm = self.norm(norm, hidden_size, eps)
        qkv = self.qkv(
            (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
            hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=qkv_bias,
        )
        heads, kv_heads = self.shard(num_heads, "query heads"), self.shard_kv_heads(num_kv_heads)
        head_norm = None
        if qk_norm:
            head_norm = self.head_norm([(f"{name}.q_norm", heads), (f"{name}.k_norm", kv_heads)], head_dim, eps)
        attention = self.attention(
            layer, heads, kv_heads, head_dim, head_norm, name, sinks=f"{name}.sinks" if sinks else ""
        )
        output = self.partial_linear(f"{name}.o_proj", hidden_size, num_heads * head_dim, bias=output_bias)
        return AttentionBlock(input_norm, qkv, attention, output)

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
    ) -> GatedMLP:
        """The gated MLP of a decoder layer: input norm, then down(act(gate(x)) * up(x)).

        name: of the MLP module in the checkpoint, with gate_proj, up_proj and down_proj. norm: name of the input norm.
        Sizes are over all ranks.
        """
        input_norm = self.norm(norm, hidden_size, eps)
        parts = [(f"{name}.gate_proj", intermediate_size), (f"{name}.up_proj", intermediate_size)]
        gate_up = self.linear(parts, hidden_size, bias=bias, parallel="column", gated=True, activation=activation)
        down = self.partial_linear(
            f"{name}.down_proj", hidden_size, intermediate_size, bias=bias, input_activation=activation
        )
        return GatedMLP(input_norm, gate_up, down)

    def _record(self, layer: L) -> L:
        self.layers.append(layer)
        return layer
