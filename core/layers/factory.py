"""Makes layers of a model, for one rank; LayerFactory (layer_factory.py) adds norms and the composite ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from attrs import evolve

from engine.core.attention.groups import CacheLayout
from engine.core.distributed.rank_group import OneRank, RankGroup
from engine.core.errors import ConfigError, near_misses
from engine.core.layers.attention import Attention, GroupedAttention
from engine.core.layers.base import Layer, torch_dtype
from engine.core.layers.embedding import Embedding, VocabParallelEmbedding
from engine.core.layers.expert_layers import ExpertLayers
from engine.core.layers.former_prefixes import FormerPrefixes, best_answer
from engine.core.layers.head_norm import HeadNorm, ProjectionNorm
from engine.core.layers.kv_scale_reader import KVScaleReader
from engine.core.layers.layer_classes import PLAIN
from engine.core.layers.linear import Linear, PartialLinear
from engine.core.layers.lm_head import AdjustedHead, LinearHead, OutputLayer, VocabShards
from engine.core.layers.rotary import GrowingRotary, RotaryEmbedding, RotarySpec
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
    StoredIn,
)

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
        self._quant_owner = owners.get("quant", "the quantization method")
        self.dtype = dtype
        self.device = device
        self.max_len = max_len
        self._group = group or OneRank()
        self.rank = self._group.rank
        self.ranks = self._group.ranks
        self.layers = []
        self.ignored: list[str] = []
        self.former_prefixes: dict[str, str] = {}
        """Prefix of names -> their prefix in an older checkpoint."""
        self.tied: dict[str, str] = {}
        """Tensor that is not read -> the tensor used in its place, which must equal it."""
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
        self.attentions: dict[int, tuple[str, Attention | GroupedAttention]] = {}
        """By decoder layer: the name of the attention module in the checkpoint, if it was given, and the layer."""
        self.head_linears: list[Linear] = []
        """The linear layers among `layers` that are output layers."""
        self._quant = quant
        self.expert_parallel = expert_parallel
        self.hidden_states = hidden_states
        """Where the states entering some decoder layers are kept; None: they are not kept."""
        self.token_embedding: Embedding | None = None
        """The embedding of tokens: the first that was made."""
        self.last_norm: Norm | None = None
        """The norm before the LM head, if `final_norm` made it."""
        self._stored = stored
        self._prefixes = FormerPrefixes({}, ())
        self._modules = None if stored is None else frozenset(name.rpartition(".")[0] for name in stored)
        self._cache = None if cache is None or cache.one else cache
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
        """Different shapes of all weights for which oneDNN compiles kernels; see `Layer.packed_shapes`."""
        return frozenset[tuple[int, ...]]().union(*(layer.packed_shapes for layer in self.layers))

    def ignore(self, pattern: str) -> None:
        """Allow the checkpoint to have tensors whose names match (fnmatch: `*.name`) and that are not read."""
        self.ignored.append(pattern)

    def stores(self, module: str) -> bool | None:
        """Whether the checkpoint has tensors of a module (MODULE.weight). None: unknown, since weights are random."""
        return None if self._modules is None else self._prefixes.stored(module) in self._modules

    def stores_tensor(self, name: str) -> bool | None:
        """Whether the checkpoint has a tensor. None: unknown, since weights are random."""
        return None if self._stored is None else self._prefixes.stored(name) in self._stored

    def accept_prefix(self, prefix: str, former: str) -> None:
        """Let a checkpoint without names that begin with `prefix` have names that begin with `former` instead.

        Both end with a dot. To be called before any layer is made: the quantization method is asked by the
        checkpoint's names first, then by the present ones.
        """
        self.former_prefixes[prefix] = former
        self._prefixes = FormerPrefixes(self.former_prefixes, self._stored or ())

    def stored_name(self, name: str) -> str:
        """The name in the checkpoint, which may have a former prefix, of a tensor or module."""
        return self._prefixes.stored(name)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, for layers of a model's own. x may be overwritten.

        All ranks must call it in the same order, with tensors of one shape. May be called while CUDA graphs are
        captured.
        """
        return self._group.all_reduce(x)

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
                names, (queries, keys, keys), (1, *[self._replicas(num_kv_heads)] * 2), strict=True
            )
        )
        return self._linear(_stored_in(stored, parts), in_features, bias=bias, parallel="column")

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
        made = tuple(LinearPart(name=name, out_features=outputs) for name, outputs in parts)
        if stored and parallel != "column":
            raise ConfigError(f"{stored} can only be stored in one with others if it is column-parallel")
        made = _stored_in(stored, made)
        return self._linear(
            made,
            in_features,
            bias=bias,
            parallel=parallel,
            gated=gated,
            activation=activation,
            exact_input=exact_input,
        )

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
        quantized: bool = True,
        activation: Activation = "silu",
        input_activation: Activation = "silu",
        exact_input: bool = False,
    ) -> Linear:
        if activation not in ACTIVATIONS:
            raise ConfigError(f"the activation {activation!r} is not known; {near_misses(activation, ACTIVATIONS)}")
        spec = self._spec(
            parts,
            in_features,
            bias=bias,
            parallel=parallel,
            gated=gated,
            activation=activation,
            input_activation=input_activation,
            exact_input=exact_input,
        )
        spec, kernel = self._ask_quant("linear", spec) if quantized else (spec, None)
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

    def _spec(
        self,
        parts: tuple[LinearPart, ...],
        in_features: int,
        *,
        bias: bool = False,
        parallel: Parallel,
        gated: bool = False,
        activation: Activation = "silu",
        input_activation: Activation = "silu",
        exact_input: bool = False,
    ) -> LinearSpec:
        return LinearSpec(
            parts=tuple(_renamed(part, self._prefixes.stored) for part in parts),
            in_features=in_features,
            bias=bias,
            dtype=self.dtype,
            device=self.device,
            parallel=parallel,
            gated=gated,
            activation=activation,
            input_activation=input_activation,
            exact_input=exact_input,
            ranks=self.ranks,
        )

    def _ask_quant(
        self, method: Literal["linear", "lm_head"], spec: LinearSpec
    ) -> tuple[LinearSpec, LinearKernel | None]:
        """The kernel that a method of the quantization plugin makes, and the spec with the names that the kernel has.
        None: the layer is not quantized."""
        if self._quant is None:
            return spec, None
        present = evolve(spec, parts=tuple(_renamed(part, self._prefixes.present) for part in spec.parts))
        specs = [spec] if present == spec else [spec, present]
        return best_answer(
            specs,
            lambda one: self._ask_kernel(method, one),
            lambda one, kernel: self._has_quantized(Linear(one, kernel, owner=self._quant_owner).tensors()),
        )

    def _ask_kernel(self, method: Literal["linear", "lm_head"], spec: LinearSpec) -> LinearKernel | None:
        call = f"{method}() of {spec.parts[0].name}"
        assert self._quant is not None
        with blame(self._quant_owner, call):
            kernel = self._quant.linear(spec) if method == "linear" else self._quant.lm_head(spec)
        right = kernel is None or isinstance(kernel, LinearKernel)
        expect(right, self._quant_owner, call, kernel, "a LinearKernel or None")
        return kernel

    def _replicas(self, num_kv_heads: int) -> int:
        """Number of ranks that hold the same KV heads."""
        return self.ranks // num_kv_heads if self.ranks > num_kv_heads and self.ranks % num_kv_heads == 0 else 1

    def embedding(self, name: str, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> Embedding:
        """The token embedding, vocab-parallel on several ranks. scale: factor on its vectors."""
        weight = f"{name}.weight"
        made: Embedding
        if self.ranks == 1:
            made = Embedding(weight, vocab_size, hidden_size, self.dtype, scale=scale)
        else:
            made = self._classes.vocab_parallel_embedding(
                weight, vocab_size, hidden_size, self.dtype, self._group, scale=scale
            )
        self.token_embedding = self.token_embedding or made
        return self._record(made)

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
        head: OutputLayer | None = None
        shards: VocabShards | None = None
        if tied is None:
            head, shards = self._quantized_head(name, vocab_size, hidden_size)
        else:
            self.ignore(f"{name}.weight")
            self.tied[f"{name}.weight"] = next(iter(tied.tensors()))
        if head is None:
            table = tied or self.embedding(name, vocab_size, hidden_size)
            head = self._record(self._classes.lm_head(table))
            shards = VocabShards.of(table) if isinstance(table, VocabParallelEmbedding) else None
        if scale != 1.0 or softcap is not None:
            head = AdjustedHead(head, self._classes.argmax, scale=scale, softcap=softcap)
        return head if shards is None else self._classes.vocab_parallel_head(head, shards)

    def _quantized_head(
        self, name: str, vocab_size: int, hidden_size: int
    ) -> tuple[OutputLayer | None, VocabShards | None]:
        """The output layer of this rank's tokens by a kernel of the quantization method, and how ranks share them.

        None: the output layer is not quantized; one rank has all tokens.
        """
        spec = self._spec((LinearPart(name=name, out_features=vocab_size),), hidden_size, parallel="column")
        spec, kernel = self._ask_quant("lm_head", spec)
        if kernel is None:
            return None, None
        shard = self.shard(vocab_size, f"outputs of {name}, which are quantized,")
        linear = Linear(spec, kernel, owner=self._quant_owner)
        self.head_linears.append(linear)
        head = LinearHead(self._record(linear), self._classes.argmax)
        if self.ranks == 1:
            return head, None
        return head, VocabShards(group=self._group, vocab_size=vocab_size, shard_size=shard)

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
        names = None
        if self._quant is not None and name:
            with blame(self._quant_owner, "kv_scales()"):
                names = self._quant.kv_scales(self._prefixes.stored(name))
            right = names is None or isinstance(names, KVScaleNames)
            expect(right, self._quant_owner, "kv_scales()", names, "a KVScaleNames or None")
        if names is not None:
            self.kv_scales.append(self._record(KVScaleReader(layer, names)))
        if sinks:
            self.sinks.append(self._record(SinkReader(layer, sinks, num_heads * self.ranks, self.dtype)))
        group, index = self.cache_place(layer)
        attention = self._classes.attention(index, num_heads, num_kv_heads, head_dim, norm, interleaved=interleaved)
        made = attention if self._cache is None else GroupedAttention(attention, group)
        self.attentions[layer] = name, made
        return made

    def cache_place(self, layer: int) -> tuple[int, int]:
        """The number of the layer's cache group (ForwardPass.of_group) and its index in the group.

        For layers of a model's own that call the attention backend or read a StatePool.
        """
        return (0, layer) if self._cache is None else self._cache.places[layer]

    def _record(self, layer: L) -> L:
        self.layers.append(layer)
        return layer


def _renamed(part: LinearPart, rename: Callable[[str], str]) -> LinearPart:
    """The part under another name, and in a layer under another name."""
    stored_in = None if part.stored_in is None else evolve(part.stored_in, name=rename(part.stored_in.name))
    return evolve(part, name=rename(part.name), stored_in=stored_in)


def _stored_in(name: str, parts: tuple[LinearPart, ...]) -> tuple[LinearPart, ...]:
    """The parts with their places in the checkpoint's layer `name`, which has all of them; unchanged if it is empty."""
    if not name:
        return parts
    starts = [0, *accumulate(part.out_features for part in parts)]
    return tuple(
        evolve(part, stored_in=StoredIn(name=name, start=start, size=starts[-1]))
        for part, start in zip(parts, starts, strict=False)
    )
