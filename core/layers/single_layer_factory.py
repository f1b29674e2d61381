"""Makes single layers of a model, for one rank; LayerFactory (layer_factory.py) adds norms and the composite ones.

What a model calls is here. Names in the checkpoint, quantization and each family of layers have a module of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve

from engine.core.attention.groups import CacheLayout
from engine.core.distributed.rank_group import OneRank, RankGroup
from engine.core.errors import ConfigError
from engine.core.layers.attention import Attention, GroupedAttention
from engine.core.layers.attention_layers import AttentionLayers
from engine.core.layers.base import Layer, torch_dtype
from engine.core.layers.checkpoint_names import CheckpointNames
from engine.core.layers.embedding import Embedding
from engine.core.layers.expert_layers import ExpertLayers
from engine.core.layers.head_norm import HeadNorm, ProjectionNorm
from engine.core.layers.layer_classes import PLAIN
from engine.core.layers.linear import Linear, PartialLinear
from engine.core.layers.linear_layers import LinearLayers
from engine.core.layers.lm_head import OutputLayer
from engine.core.layers.quant_kernels import QuantKernels
from engine.core.layers.rank_shards import RankShards
from engine.core.layers.rotary import GrowingRotary, RotaryEmbedding, RotarySpec
from engine.core.layers.vocab_layers import VocabLayers
from engine.core.quant.base import Activation, LinearPart, Parallel, QuantMethod

if TYPE_CHECKING:
    import torch

    from engine.core.layers.hidden_states import HiddenStates
    from engine.core.layers.norm import Norm

L = TypeVar("L", bound=Layer)


class SingleLayerFactory(ExpertLayers):
    """Makes the layers of a model for one rank and records them for the loader. Names are those in the checkpoint.

    The model decides which layers it has. The factory decides their dtype, device, kernels and shards.
    """

    layers: list[Layer]
    """All layers, which the loader fills. A layer of a model's own is appended."""
    max_len: int | None
    """Longest context that is served, tokens; None: the model's."""

    def __init__(
        self,
        *,
        dtype: str,
        device: str,
        quant: QuantMethod[Any] | None = None,
        group: RankGroup | None = None,
        fused: bool = False,
        owners: Mapping[str, str] = {},
        max_len: int | None = None,
        cache: CacheLayout | None = None,
        stored: Collection[str] | None = None,
        expert_parallel: bool = False,
        hidden_states: HiddenStates | None = None,
    ) -> None:
        """group: the ranks that share the model; None: a single rank. fused: use Triton kernels (fused.py) where they
        exist. owners: extension point (quant, models) -> how errors name its plugin. max_len: longest context that is
        served, tokens; None: the model's. cache: which layers share block tables; None: all. stored: names of the
        checkpoint's tensors; None: it has every tensor that layers ask for. expert_parallel: each rank has some of a
        layer's experts, not a shard of each. hidden_states: where the states entering some decoder layers are kept;
        None: they are not kept.
        """
        torch_dtype(dtype)
        self.model_owner = owners.get("models", "the model")
        """How errors name the plugin of the model."""
        self.dtype = dtype
        self.device = device
        self.max_len = max_len
        self.expert_parallel = expert_parallel
        self.hidden_states = hidden_states
        """Where the states entering some decoder layers are kept; None: they are not kept."""
        self.last_norm: Norm | None = None
        """The norm before the LM head, if `final_norm` made it."""
        self.layers = []
        self._group = group or OneRank()
        self.rank = self._group.rank
        self.ranks = self._group.ranks
        self._shards = RankShards(self.ranks)

        self._names = CheckpointNames(stored)
        self.ignored = self._names.ignored
        """Patterns of the checkpoint's tensors that may be there and are not read."""
        self.former_prefixes = self._names.former_prefixes
        """Prefix of names -> their prefix in an older checkpoint."""
        self.tied = self._names.tied
        """Tensor that is not read -> the tensor used in its place, which must equal it."""
        self._quant_kernels = QuantKernels(quant, owners.get("quant", "the quantization method"), self._names)
        self.quant_owner = "" if quant is None else self._quant_kernels.owner
        """How errors name the plugin of the quantization method. Empty: there is none."""
        self.ignored += self._quant_kernels.ignored()

        self._classes = PLAIN
        if fused:  # imported here: it imports Triton
            from engine.core.layers.fused import fused_classes

            self._classes = fused_classes(dtype, device)
        self._linear_layers = LinearLayers(
            dtype=dtype,
            device=device,
            group=self._group,
            names=self._names,
            quant_kernels=self._quant_kernels,
            classes=self._classes,
        )
        self._vocab_layers = VocabLayers(
            dtype=dtype,
            group=self._group,
            names=self._names,
            classes=self._classes,
            linear_layers=self._linear_layers,
            layers=self.layers,
        )
        self.head_linears = self._vocab_layers.head_linears
        """The linear layers among `layers` that are output layers."""
        self._attention_layers = AttentionLayers(
            dtype=dtype,
            ranks=self.ranks,
            cache=cache,
            classes=self._classes,
            quant_kernels=self._quant_kernels,
            layers=self.layers,
        )
        self.kv_scales = self._attention_layers.kv_scales
        """Readers of the KV scales that the checkpoint may have."""
        self.sinks = self._attention_layers.sinks
        """Readers of the attention sinks of layers that have them."""
        self.attentions = self._attention_layers.made
        """By decoder layer: the name of the attention module in the checkpoint, if it was given, and the layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on this rank."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def packed_shapes(self) -> frozenset[tuple[int, ...]]:
        """Different shapes of all weights for which oneDNN compiles kernels; see `Layer.packed_shapes`."""
        return frozenset[tuple[int, ...]]().union(*(layer.packed_shapes for layer in self.layers))

    @property
    def token_embedding(self) -> Embedding | None:
        """The embedding of tokens: the first that was made. None: none was."""
        return self._vocab_layers.token_embedding

    def ignore(self, pattern: str) -> None:
        """Allow the checkpoint to have tensors whose names match (fnmatch: `*.name`) and that are not read."""
        self.ignored.append(pattern)

    def stores(self, module: str) -> bool | None:
        """Whether the checkpoint has tensors of a module (MODULE.weight). None: unknown, since weights are random."""
        return self._names.has_module(module)

    def stores_tensor(self, name: str) -> bool | None:
        """Whether the checkpoint has a tensor. None: unknown, since weights are random."""
        return self._names.has_tensor(name)

    def accept_prefix(self, prefix: str, former: str) -> None:
        """Let a checkpoint without names that begin with `prefix` have names that begin with `former` instead.

        Both end with a dot. To be called before any layer is made: the quantization method is asked by the
        checkpoint's names first, then by the present ones.
        """
        self._names.accept_prefix(prefix, former)

    def stored_name(self, name: str) -> str:
        """The name in the checkpoint, which may have a former prefix, of a tensor or module."""
        return self._names.stored(name)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, for layers of a model's own. x may be overwritten.

        All ranks must call it in the same order, with tensors of one shape. May be called while CUDA graphs are
        captured.
        """
        return self._group.all_reduce(x)

    def shard(self, total: int, what: str) -> int:
        """This rank's shard of `total`. Raises ConfigError, naming `what`, if the ranks do not divide it evenly."""
        return self._shards.shard(total, what)

    share = shard
    """The former name of `shard`, kept for older plugins."""

    def shard_kv_heads(self, total: int) -> int:
        """This rank's number of KV heads, of `total`. With more ranks than heads, adjacent ranks hold replicas of one.

        Raises ConfigError if neither number divides the other.
        """
        return self._shards.shard_kv_heads(total)

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
        stored: str = "",
    ) -> Linear:
        """The projections to queries, keys and values as one layer, column-parallel by heads.

        names: of the three projections in the checkpoint. stored: name of the checkpoint's layer that holds all
        three, one after the other; empty: they are three layers. Numbers of heads are over all ranks.
        """
        self.shard(num_heads, "query heads")
        self.shard_kv_heads(num_kv_heads)
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        parts = tuple(
            LinearPart(name=name, out_features=outputs, replicas=replicas)
            for name, outputs, replicas in zip(
                names, (queries, keys, keys), (1, *[self._shards.kv_replicas(num_kv_heads)] * 2), strict=True
            )
        )
        return self._record(self._linear_layers.make(parts, in_features, bias=bias, parallel="column", stored=stored))

    def linear(
        self,
        parts: Sequence[tuple[str, int]],
        in_features: int,
        *,
        bias: bool = False,
        parallel: Parallel = "none",
        gated: bool = False,
        activation: Activation = "silu",
        stored: str = "",
        exact_input: bool = False,
    ) -> Linear:
        """A linear layer.

        parts: (name, outputs) of each of the checkpoint's layers to merge; their outputs are concatenated.
        parallel: column (a rank has some outputs of each part), row (some inputs; the results are summed over
            the ranks) or none.
        gated: the parts are gate and up projections of one size; call the layer by `gated` or `gated_quantized_for`.
        activation: of the gate of a gated layer. stored: name of the checkpoint's layer that holds all parts,
            one after the other; empty: each part is a layer of its own name.
        exact_input: as in LinearSpec. Sizes are over all ranks.
        """
        if parallel == "column":
            for name, outputs in parts:
                self.shard(outputs, f"outputs of {name}")
        if parallel == "row":
            self.shard(in_features, f"inputs of {parts[0][0]}")
        if stored and parallel != "column":
            raise ConfigError(f"{stored} can only be stored in one with others if it is column-parallel")
        made = self._linear_layers.make(
            [LinearPart(name=name, out_features=outputs) for name, outputs in parts],
            in_features,
            bias=bias,
            parallel=parallel,
            gated=gated,
            activation=activation,
            exact_input=exact_input,
            stored=stored,
        )
        return self._record(made)

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

        input_activation: of the gated layer that computes the input, if one does.
        """
        self.shard(in_features, f"inputs of {name}")
        linear = self._linear_layers.make(
            [LinearPart(name=name, out_features=out_features)],
            in_features,
            bias=bias,
            parallel="row",
            reduces=False,
            input_activation=input_activation,
        )
        return PartialLinear(self._record(linear), self._group)

    def embedding(self, name: str, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> Embedding:
        """The token embedding, vocab-parallel on several ranks. scale: factor on its vectors."""
        return self._vocab_layers.embedding(name, vocab_size, hidden_size, scale=scale)

    def lm_head(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied: Embedding | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> OutputLayer:
        """The output layer. With `tied` it multiplies by that embedding, and a copy in the checkpoint must equal it.

        Without `tied`, the quantization method may have a kernel for the weight. scale: factor on the logits. softcap:
        logits then become softcap * tanh(logit / softcap); None: unchanged.
        """
        return self._vocab_layers.lm_head(name, vocab_size, hidden_size, tied, scale=scale, softcap=softcap)

    def rotary(self, spec: RotarySpec) -> RotaryEmbedding:
        """A rotary embedding. Frequencies stored in older checkpoints are not read."""
        self.ignore("*.rotary_emb.inv_freq")
        made = self._classes.rotary(evolve(spec, max_len=spec.max_len or self.max_len), self.dtype, self.device)
        return GrowingRotary(made, spec, self.dtype) if spec.query_growth else made

    def attention(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: HeadNorm | ProjectionNorm | None = None,
        name: str = "",
        *,
        sinks: str = "",
        interleaved: bool = False,
    ) -> Attention | GroupedAttention:
        """Attention of one decoder layer. Numbers of heads are this rank's.

        norm: of the heads of queries and keys. name: of the module in the checkpoint, to read KV scales by; without a
        name they are not read. sinks: name of the tensor with an attention sink per query head, if the layer has sinks
        (`ModelSpec.sinks` says so too). interleaved: as in RotarySpec.
        """
        return self._attention_layers.make(
            layer, num_heads, num_kv_heads, head_dim, norm, name, sinks=sinks, interleaved=interleaved
        )

    def cache_place(self, layer: int) -> tuple[int, int]:
        """The number of the layer's cache group (ForwardPass.of_group) and its index in the group.

        For layers of a model's own that call the attention backend or read a StatePool.
        """
        return self._attention_layers.cache_place(layer)

    def _record(self, layer: L) -> L:
        self.layers.append(layer)
        return layer
