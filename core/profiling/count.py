"""Counts what a model's layers cost, from the layers that its factory has made, loaded or not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from engine.core.distributed.rank_group import OneRank
from engine.core.layers import (
    Embedding,
    Experts,
    HeadNorm,
    Layer,
    LayerFactory,
    LayerNorm,
    Linear,
    LMHead,
    ProjectionNorm,
    torch_dtype,
)
from engine.core.layers.kv_scale_reader import KVScaleReader
from engine.core.layers.norm import RMSNorm
from engine.core.layers.sinks import SinkReader
from engine.core.plugin_host.cache_groups import cache_layout
from engine.core.plugin_host.derived import shape_of
from engine.core.profiling.cost import ModelCost, ModuleCost, ModuleKind

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionSpec
    from engine.core.attention.groups import CacheLayout
    from engine.core.config.tree import EngineConfig
    from engine.core.models.base import Model
    from engine.core.quant.base import QuantMethod, TensorSpec

EIGHT_BITS = (6, 12)
"""Weights of more bits than the first and fewer than the second number, scales included, count as 8-bit weights."""


def count_model(layers: LayerFactory, layout: CacheLayout) -> ModelCost:
    """Count the modules of one rank.

    layers: the factory that made the model's layers. Weights count with their bytes on the device, or before they are
    loaded with those in the checkpoint. layout: the cache groups of the rank.
    """
    counter = _Counter(layers)
    for number in layers.attentions:
        counter.attention(attention_name(layers, number), layout.groups[layout.places[number][0]].spec)
    unnamed = set(range(len(layout.places))) - layers.attentions.keys()
    for state in layout.states:
        from engine.core.attention.state_pool import StatePool

        size = StatePool.bytes_per_sequence(state.tensors)
        for number in state.layers:
            counter.state(f"layers.{number}.state", size)
    for group in layout.groups:  # layers of a model's own, which call the backend
        for number in unnamed.intersection(group.layers):
            counter.attention(attention_name(layers, number), group.spec)
    for layer in layers.layers:
        counter.layer(layer)
    return ModelCost(modules=tuple(counter.modules), uncounted=tuple(counter.uncounted))


def count_unloaded(
    model: type[Model],
    config: Mapping[str, Any],
    engine_config: EngineConfig,
    *,
    dtype: str,
    kv_dtype: str = "",
    quant: QuantMethod[Any] | None = None,
    options: Any = None,
    rank: int = 0,
    ranks: int = 1,
) -> ModelCost:
    """Count the modules of one rank without reading weights, whose bytes are those in the checkpoint.

    config: config.json. engine_config: for the cache groups and expert parallelism. kv_dtype: of the KV cache; empty:
    `dtype`. quant: the checkpoint's quantization method; None: it has none. options: the model's.
    Raises what the model's constructor raises for a config.json that it refuses.
    """
    spec = shape_of(model, config)
    layout = cache_layout(spec, engine_config, dtype, spec.max_len, kv_dtype or dtype, ranks)
    group = OneRank()
    group.rank, group.ranks = rank, ranks
    layers = LayerFactory(
        dtype=dtype,
        device="cpu",
        quant=quant,
        group=group,
        cache=layout,
        expert_parallel=engine_config.executor.expert_parallel,
        max_len=spec.max_len,
    )
    model(config, layers, options)
    return count_model(layers, layout)


def merged_name(names: Iterable[str]) -> str:
    """One name for modules that are computed as one: model.layers.0.mlp.gate_proj+up_proj."""
    parts = list(names)
    alike = takewhile(lambda words: len(set(words)) == 1, zip(*(part.split(".")[:-1] for part in parts), strict=False))
    prefix = "".join(f"{words[0]}." for words in alike)
    return prefix + "+".join(part.removeprefix(prefix) for part in parts)


def module_name(layer: Layer) -> str:
    """The name of a layer in the tree of modules; empty for one without a name."""
    if isinstance(layer, Linear):
        return merged_name(part.name for part in layer.spec.parts)
    if isinstance(layer, Experts):
        return layer.spec.name
    if isinstance(layer, LMHead):
        return layer.table.name.removesuffix(".weight")
    names = [name.rpartition(".")[0] for name in layer.tensors()]
    return merged_name(dict.fromkeys(names)) if names else ""


def counted_name(layers: LayerFactory, layer: Layer) -> str:
    """The name under which `count_model` counts a layer of this factory."""
    if isinstance(layer, LMHead):
        own = [name for name, tied in layers.tied.items() if tied == layer.table.name]
        return own[0].removesuffix(".weight") if own else module_name(layer)
    return module_name(layer) or type(layer).__name__


def attention_name(layers: LayerFactory, number: int) -> str:
    """The name under which `count_model` counts the attention of a decoder layer."""
    name = layers.attentions[number][0] if number in layers.attentions else ""
    name = name or f"layers.{number}.attention"
    return name if name.endswith(".attention") else f"{name}.attention"


class _Counter:
    """Collects the modules of one rank."""

    def __init__(self, layers: LayerFactory) -> None:
        self.modules: list[ModuleCost] = []
        self.uncounted: list[str] = []
        self._layers = layers
        self._ranks = layers.ranks
        self._itemsize = torch_dtype(layers.dtype).itemsize
        self._tied = set(layers.tied.values())
        self._head_tables = {id(layer.table) for layer in layers.layers if isinstance(layer, LMHead)}
        self._head_linears = {id(linear) for linear in layers.head_linears}

    def attention(self, name: str, spec: AttentionSpec) -> None:
        """The attention of one layer, of a group of this spec."""
        [window] = set(spec.sliding_windows)
        heads, values = spec.num_heads, spec.num_heads * spec.output_dim
        kv = sum(spec.numbers_per_token)
        self.modules.append(
            ModuleCost(
                name=name,
                kind="attention",
                window=window,
                flops_per_pair=2 * heads * spec.head_dim + 2 * values,
                kv_bytes_per_token=kv * _itemsize(spec.kv_dtype),
                activation_bytes_per_row=(heads * spec.head_dim + kv + values) * self._itemsize,
            )
        )

    def state(self, name: str, size: int) -> None:
        """A layer with a state of `size` bytes per sequence, whose FLOPs are unknown."""
        self.modules.append(ModuleCost(name=name, kind="state", state_bytes=size))
        self.uncounted.append(name)

    def layer(self, layer: Layer) -> None:
        """A layer of the factory."""
        if isinstance(layer, Linear):
            self._linear(layer)
        elif isinstance(layer, Experts):
            self._experts(layer)
        elif isinstance(layer, LMHead):
            self._lm_head(layer)
        elif isinstance(layer, Embedding):
            self._embedding(layer)
        elif isinstance(layer, (RMSNorm, LayerNorm)):
            self._norm(layer)
        elif isinstance(layer, (HeadNorm, ProjectionNorm, SinkReader, KVScaleReader)):
            self._other("norm" if isinstance(layer, (HeadNorm, ProjectionNorm)) else "other", layer)
        else:
            self._other("other", layer)
            self.uncounted += (name for name, spec in layer.tensors().items() if len(spec.shape) > 1)

    def _linear(self, layer: Linear) -> None:
        spec = layer.spec
        inputs, outputs = spec.rank_inputs, sum(spec.rank_outputs(part) for part in spec.parts)
        plain = inputs * outputs * self._itemsize
        weights, eight_bit = self._weights(layer, plain, inputs * outputs)
        written = 0 if id(layer) in self._head_linears else outputs // 2 if spec.gated else outputs
        self.modules.append(
            ModuleCost(
                name=module_name(layer),
                kind="lm_head" if id(layer) in self._head_linears else "linear",
                rows="sampled" if id(layer) in self._head_linears else "tokens",
                eight_bit=eight_bit,
                weight_bytes=weights,
                flops_per_row=2 * inputs * outputs,
                activation_bytes_per_row=(inputs + written) * self._itemsize,
            )
        )

    def _experts(self, layer: Experts) -> None:
        spec = layer.spec
        held, inner = len(spec.rank_experts), spec.rank_intermediate
        numbers = 3 * spec.hidden_size * inner * held
        weights, eight_bit = self._weights(layer, numbers * self._itemsize, numbers)
        self.modules.append(
            ModuleCost(
                name=spec.name,
                kind="experts",
                eight_bit=eight_bit,
                num_experts=spec.num_experts,
                top_k=spec.top_k,
                expert_bytes=weights,
                flops_per_row=6 * spec.hidden_size * inner * spec.top_k * held / spec.num_experts,
                activation_bytes_per_row=2 * spec.hidden_size * self._itemsize,
            )
        )

    def _lm_head(self, layer: LMHead) -> None:
        table = layer.table
        numbers = table.rows * table.shape[1]
        self.modules.append(
            ModuleCost(
                name=counted_name(self._layers, layer),
                kind="lm_head",
                rows="sampled",
                weight_bytes=numbers * self._itemsize,
                flops_per_row=2 * numbers,
                activation_bytes_per_row=table.shape[1] * self._itemsize,
            )
        )

    def _embedding(self, layer: Embedding) -> None:
        if id(layer) in self._head_tables and layer.name not in self._tied:
            return  # the table of an LM head, counted there
        self.modules.append(
            ModuleCost(
                name=module_name(layer),
                kind="embedding",
                activation_bytes_per_row=2 * layer.shape[1] * self._itemsize,
            )
        )

    def _norm(self, layer: RMSNorm | LayerNorm) -> None:
        [size] = next(iter(layer.tensors().values())).shape
        self.modules.append(
            ModuleCost(
                name=module_name(layer),
                kind="norm",
                weight_bytes=layer.nbytes or stored_bytes(layer, self._ranks),
                activation_bytes_per_row=4 * size * self._itemsize,  # input and residual, norm and next residual
            )
        )

    def _other(self, kind: ModuleKind, layer: Layer) -> None:
        """A layer of which only the weights count: norms of heads are a part of the attention's kernel."""
        size = layer.nbytes or stored_bytes(layer, self._ranks)
        if size:
            name = counted_name(self._layers, layer)
            self.modules.append(ModuleCost(name=name, kind=kind, weight_bytes=size))

    def _weights(self, layer: Linear | Experts, plain: int, numbers: int) -> tuple[int, bool]:
        """Bytes of the weights, and whether they have about 8 bits.

        plain: bytes without quantization; a copy that a kernel keeps next to quantized weights is not read as well.
        """
        size = layer.nbytes or stored_bytes(layer, self._ranks)
        bias = self._bias_bytes(layer)
        size = min(size, plain + bias)
        low, high = EIGHT_BITS
        return size, low < 8 * (size - bias) / max(numbers, 1) < high

    def _bias_bytes(self, layer: Linear | Experts) -> int:
        spec = layer.spec
        if not spec.bias:
            return 0
        if isinstance(layer, Linear):
            return sum(layer.spec.rank_outputs(part) for part in layer.spec.parts) * self._itemsize
        experts = layer.spec
        return len(experts.rank_experts) * (2 * experts.rank_intermediate + experts.hidden_size) * self._itemsize


def stored_bytes(layer: Layer, ranks: int) -> int:
    """Bytes of a rank's shards of a layer's tensors in the checkpoint; optional ones, and unknown sizes, count none."""
    return sum(_shard_bytes(tensor, ranks) for tensor in layer.tensors().values() if not tensor.optional)


def _shard_bytes(spec: TensorSpec, ranks: int) -> int:
    if any(size < 0 for size in spec.shape):
        return 0
    shared = ranks // spec.replicas if spec.shard_dim is not None else 1
    return math.prod(spec.shape) * _itemsize(spec.dtypes[0]) // max(shared, 1)


def _itemsize(dtype: str) -> int:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize
