"""Builds the library's model with the engine's layers in it, to be filled by the loader."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from engine.core.attention import AttentionSpec
from engine.core.errors import CheckpointError, ConfigError
from engine.core.layers import Embedding, HeadNorm, LayerFactory, RotaryEmbedding, torch_dtype
from engine.core.models import ForwardPass
from engine.plugins.models.fallback import attention, library
from engine.plugins.models.fallback.attention import AttentionCall, AttentionCalls, serve_attention
from engine.plugins.models.fallback.head import Head
from engine.plugins.models.fallback.locality import check_locality
from engine.plugins.models.fallback.modules import (
    AttentionModule,
    EmbeddingModule,
    GatedModule,
    HeadModule,
    LinearModule,
    MergedLinear,
    MergedPart,
    RMSNormModule,
)
from engine.plugins.models.fallback.names import checkpoint_names, ignored_patterns
from engine.plugins.models.fallback.parallel import ParallelPlan, check_heads
from engine.plugins.models.fallback.recognize import (
    FoundAttention,
    FoundGated,
    find_attention,
    find_gated,
    find_norms,
    find_rotary,
)
from engine.plugins.models.fallback.tensors import AfterLoading, ConvertedTensors, ModuleTensor, make_buffers, put
from engine.plugins.models.fallback.trace import Blueprint

EXPERTS = "grouped_mm"
"""The library's implementation of experts in few kernels, without waiting for the device."""

log = logging.getLogger(__name__)


class Built:
    """The library's model, whose weights the loader fills; `forward` and `head` compute with it."""

    def __init__(self, config: Mapping[str, Any], blueprint: Blueprint, layers: LayerFactory) -> None:
        """Raises ConfigError for a number of ranks that cannot share the model, RefusedError for anything else."""
        attention.register()
        self._blueprint = blueprint
        self._layers = layers
        self._dtype = torch_dtype(layers.dtype)
        self._model = model = library.build_empty(config, self._dtype, attention.NAME, EXPERTS)
        self._decoder = library.decoder_of(model)
        self._name = type(model).__name__
        self._modules: dict[str, Any] = dict(model.named_modules())
        self._places = _places(model)
        tensors = {name: getattr(module, attribute) for name, (module, attribute, _) in self._places.items()}
        self._names = checkpoint_names(model, tensors)
        self._plan = ParallelPlan(model, layers.ranks)
        check_heads(blueprint, self._plan, layers, model)
        self._calls = AttentionCalls(blueprint.calls)
        self._left = set(tensors)
        """Tensors that no layer reads yet."""
        for pattern in ignored_patterns(model):
            layers.ignore(pattern)
        self._make_layers(config)
        # Before weights are there: the library's initialization would overwrite them.
        self._unmade = make_buffers(model, layers.device, frozenset(self._places))
        self._cache_places = [layers.cache_place(layer) for layer in range(len(blueprint.calls))]
        self._calls.bind(self._modules, self._cache_places)
        serve_attention(model, self._calls)
        self._say_what_serves()

    def forward(self, run: ForwardPass) -> torch.Tensor:
        """Hidden states of a pass's tokens: [tokens, hidden_size]."""
        tokens, positions = run.batch.tokens[None], run.batch.positions[None]
        self._calls.begin(run)
        try:
            out = self._decoder(input_ids=tokens, position_ids=positions, use_cache=False)
        except BaseException:
            self._calls.abandon()
            raise
        self._calls.end()
        hidden: torch.Tensor = out[0][0]
        return hidden

    def _say_what_serves(self) -> None:
        if self._layers.rank:
            return
        log.warning("%s runs by the code of %s, not by a native model", self._name, library.version())
        if any(hasattr(module, "engine_longest") for module in self._modules.values()):
            log.warning(
                "contexts of %s are limited to %d tokens: beyond, transformers rotates all sequences of a batch"
                " by the longest",
                self._name,
                self._blueprint.max_len,
            )
        if self._blueprint.experts:
            whole = ", and whole on every rank" if self._layers.ranks > 1 else ""
            log.warning("the experts of %s are not quantized%s", self._name, whole)

    def _make_layers(self, config: Mapping[str, Any]) -> None:
        """Make the engine's layers, in the order of the modules, and put them in the place of the library's."""
        model, blueprint = self._model, self._blueprint
        norms, gated = find_norms(model), find_gated(model, blueprint)
        rope = find_rotary(model, config, blueprint)
        attentions = find_attention(model, blueprint, norms, rope) if rope is not None else {}
        rotary = self._layers.rotary(rope) if rope is not None and attentions else None
        table, output = model.get_input_embeddings(), model.get_output_embeddings()
        group_of = {name: group for group in self._linear_groups() for name in group}
        kept: list[tuple[nn.Module, Embedding]] = []
        embedding: Embedding | None = None
        for name, module in list(self._modules.items()):
            tensors = [one for one in self._left if one.startswith(f"{name}.")]
            if not tensors or module is output:
                continue  # made with a module around it
            if module is table:
                embedding = self._make_embedding(name, kept)
            elif name in attentions and rotary is not None and self._is_whole(attentions[name]):
                self._make_attention(attentions[name], rotary)
            elif name in gated and self._is_sharded((gated[name].gate, gated[name].up), gated[name].down):
                self._make_gated(gated[name])
            elif name in norms and norms[name].size == blueprint.hidden_size and self._has_name(name):
                norm = self._layers.norm(self._stored(name), norms[name].size, norms[name].eps)
                self._put(name, RMSNormModule(norm))
            elif name in group_of:
                self._make_linear(group_of[name])
        self._read_for_attention()
        self.head = self._make_head(embedding)
        self._make_tensors()
        self._layers.layers.append(AfterLoading(lambda: self._finish(kept)))

    def _read_for_attention(self) -> None:
        """Have sinks, and the scales of a quantized KV cache, read for attention that runs as the library wrote it."""
        for layer, call in enumerate(self._blueprint.calls):
            if not isinstance(self._modules[call.module], AttentionModule):
                self._attention(layer, call, None, call.module)

    def _attention(self, layer: int, call: AttentionCall, norm: HeadNorm | None, stored: str) -> Any:
        """The attention layer of one call. stored: name of the module in the checkpoint."""
        layers, sinks = self._layers, ""
        if call.arguments.sinks is not None:
            name = f"{call.module}.{call.arguments.sinks}"
            sinks = self._names.renamed[name]
            self._left.discard(name)
            put(self._places[name][0], call.arguments.sinks, torch.zeros(0))  # read by the attention layer instead
        heads, kv_heads = layers.shard(call.heads, "query heads"), layers.shard_kv_heads(call.kv_heads)
        return layers.attention(layer, heads, kv_heads, call.key_dim, norm, stored, sinks=sinks)

    def _put(self, name: str, module: nn.Module) -> None:
        """Put a module in the place of the one of that name; its tensors are then read by layers."""
        parent, _, attribute = name.rpartition(".")
        self._model.get_submodule(parent)._modules[attribute] = module
        self._modules[name] = module
        self._left = {one for one in self._left if not one.startswith(f"{name}.")}

    def _has_name(self, name: str) -> bool:
        """Whether a checkpoint stores the module's weight as a tensor of its own, NAME.weight."""
        return self._names.renamed.get(f"{name}.weight", "").endswith(".weight")

    def _stored(self, name: str) -> str:
        """The name of a module in the checkpoint."""
        return self._names.renamed[f"{name}.weight"].removesuffix(".weight")

    def _is_sharded(self, first: Sequence[str], last: str) -> bool:
        """Whether ranks share these linear modules by outputs and the last one by inputs, and layers can hold them."""
        names = (*first, last)
        linears = [self._modules[name] for name in names]
        alike = len({linear.bias is None for linear in linears[:-1]}) == 1
        in_plan = self._layers.ranks == 1 or (
            all(self._plan.linear(name) == "column" for name in first) and self._plan.linear(last) == "row"
        )
        return alike and in_plan and all(self._can_replace(name) for name in names)

    def _is_whole(self, found: FoundAttention) -> bool:
        """Whether the engine's layers can hold an attention module."""
        return self._is_sharded(found.qkv, found.output) and all(self._has_name(name) for name in found.norms or ())

    def _make_attention(self, found: FoundAttention, rotary: RotaryEmbedding) -> None:
        layers, call = self._layers, found.call
        query, key, value = found.qkv
        first, last = self._modules[query], self._modules[found.output]
        qkv = layers.qkv(
            (self._stored(query), self._stored(key), self._stored(value)),
            first.in_features,
            num_heads=call.heads,
            num_kv_heads=call.kv_heads,
            head_dim=call.key_dim,
            bias=first.bias is not None,
        )
        heads, kv_heads = layers.shard(call.heads, "query heads"), layers.shard_kv_heads(call.kv_heads)
        norm = None
        if found.norms is not None:
            parts = [(self._stored(name), count) for name, count in zip(found.norms, (heads, kv_heads), strict=True)]
            norm = layers.head_norm(parts, call.key_dim, found.eps)
        made = self._attention(found.layer, call, norm, self._stored(query).rpartition(".")[0])
        output = layers.linear(
            [(self._stored(found.output), last.out_features)],
            last.in_features,
            bias=last.bias is not None,
            parallel="row",
        )
        self._put(found.name, AttentionModule(qkv, made, output, rotary, self._calls))

    def _make_gated(self, found: FoundGated) -> None:
        layers, gate, down = self._layers, self._modules[found.gate], self._modules[found.down]
        gate_up = layers.linear(
            [(self._stored(name), gate.out_features) for name in (found.gate, found.up)],
            gate.in_features,
            bias=gate.bias is not None,
            parallel="column",
            gated=True,
            activation=found.activation,
        )
        made = layers.partial_linear(
            self._stored(found.down),
            down.out_features,
            down.in_features,
            bias=down.bias is not None,
            input_activation=found.activation,
        )
        self._put(found.name, GatedModule(gate_up, made))

    def _can_replace(self, name: str) -> bool:
        """Whether a plain linear module computes in the model's dtype and has its own weight in checkpoints."""
        module = self._modules[name]
        return (
            type(module) is nn.Linear
            and self._has_name(name)
            and (name in self._blueprint.linears or ".experts." in name)  # a trace meets only some of the experts
            and module is not self._model.get_output_embeddings()
            and all(self._places[f"{name}.{one}"][2] == self._layers.dtype for one in _tensors_of(module))
        )

    def _linear_groups(self) -> list[tuple[str, ...]]:
        """Names of the linear modules to replace; those with one input that ranks share alike become one layer."""
        replaced = [name for name in self._modules if self._can_replace(name)]
        merged: list[tuple[str, ...]] = []
        for siblings in self._blueprint.siblings:
            kinds: dict[Any, list[str]] = {}
            for name in siblings:
                if name in replaced:
                    kinds.setdefault((self._plan.linear(name), self._modules[name].bias is None), []).append(name)
            merged += [tuple(group) for group in kinds.values() if len(group) > 1]
        together = {name for group in merged for name in group}
        return [*merged, *((name,) for name in replaced if name not in together)]

    def _make_linear(self, group: tuple[str, ...]) -> None:
        """Replace linear modules by one layer."""
        modules = [self._modules[name] for name in group]
        first, parallel = modules[0], self._plan.linear(group[0])
        if parallel == "column":
            self._check_kv_heads(group)
        parts = [(self._stored(name), module.out_features) for name, module in zip(group, modules, strict=True)]
        made = self._layers.linear(parts, first.in_features, bias=first.bias is not None, parallel=parallel)
        if len(group) == 1:
            self._put(group[0], LinearModule(made))
            return
        merged = MergedLinear(made, [made.spec.rank_outputs(part) for part in made.spec.parts])
        for index, (name, module) in enumerate(zip(group, modules, strict=True)):
            self._put(name, MergedPart(merged, index, module.in_features, module.out_features))

    def _check_kv_heads(self, group: tuple[str, ...]) -> None:
        """Raise ConfigError where ranks would split a KV head: only recognized attention has replicas of heads."""
        parent = group[0].rpartition(".")[0]
        for call in self._blueprint.calls:
            if call.module == parent and call.kv_heads % self._layers.ranks:
                raise ConfigError(
                    f"{self._layers.ranks} ranks cannot share the {call.kv_heads} KV heads of {self._name}, which"
                    " transformers computes; use a number of ranks that divides them"
                )

    def _make_embedding(self, name: str, kept: list[tuple[nn.Module, Embedding]]) -> Embedding:
        """Replace the token embedding, or have it filled if it does more than look up."""
        module = self._modules[name]
        made = self._layers.embedding(self._stored(name), module.num_embeddings, module.embedding_dim)
        if type(module) is nn.Embedding:
            self._put(name, EmbeddingModule(made))
        elif self._layers.ranks == 1:
            kept.append((module, made))
            self._left.discard(f"{name}.weight")
        else:
            raise ConfigError(
                f"{self._name} has a token embedding of its own ({type(module).__name__}), which ranks cannot share;"
                " use --tensor-parallel 1"
            )
        return made

    def _make_head(self, embedding: Embedding | None) -> Head:
        """The output layer, tied to the embedding if the library ties them."""
        model, layers = self._model, self._layers
        output = model.get_output_embeddings()
        name = next(name for name, module in self._modules.items() if module is output)
        is_tied = f"{name}.weight" not in self._places
        if (is_tied and embedding is None) or not (is_tied or self._has_name(name)):
            raise CheckpointError(f"the output layer of {self._name} is tied or stored in a form that is not served")
        stored = name if is_tied else self._stored(name)
        made = layers.lm_head(stored, output.out_features, output.in_features, embedding if is_tied else None)
        module = HeadModule(made)
        if output.bias is not None:
            module.bias = output.bias
            layers.layers.append(ModuleTensor(module, "bias", self._names.renamed[f"{name}.bias"], dtype=layers.dtype))
        self._put(name, module)
        return Head(model, name, module, made, self._blueprint)

    def _make_tensors(self) -> None:
        """Record the tensors of all modules that run as the library wrote them."""
        for name in [name for name in self._places if name in self._left]:
            module, attribute, dtype = self._places[name]
            self._plan.check_tensor(module, name.rpartition(".")[0], attribute)
            if name in self._names.renamed:
                self._layers.layers.append(ModuleTensor(module, attribute, self._names.renamed[name], dtype=dtype))
        for conversion in self._names.conversions:
            self._layers.layers.append(ConvertedTensors(conversion, self._places))

    def _finish(self, kept: list[tuple[nn.Module, Embedding]]) -> None:
        """Fill what no checkpoint has, and check that the model treats tokens one by one outside of attention."""
        for module, embedding in kept:
            put(module, "weight", embedding.weight)
        left = [name for name, tensor in self._model.named_parameters() if tensor.is_meta]
        if self._unmade or left:
            raise CheckpointError(
                f"{self._name} of transformers has values that neither the checkpoint nor its own code gives:"
                f" {', '.join([*self._unmade, *left][:5])}; it needs a model plugin of its own"
            )
        check_locality(self.forward, self._specs(), self._blueprint.vocab_size, self._layers.device, self._name)

    def _specs(self) -> list[AttentionSpec]:
        """The attention of each cache group on this rank, with blocks of one token."""
        layers, made = self._layers, []
        for group in range(1 + max(group for group, _ in self._cache_places)):
            calls = [
                call for call, place in zip(self._blueprint.calls, self._cache_places, strict=True) if place[0] == group
            ]
            made.append(
                AttentionSpec(
                    num_layers=len(calls),
                    num_heads=layers.shard(calls[0].heads, "query heads"),
                    num_kv_heads=layers.shard_kv_heads(calls[0].kv_heads),
                    head_dim=calls[0].key_dim,
                    scale=calls[0].arguments.scale,
                    dtype=layers.dtype,
                    kv_dtype=layers.dtype,
                    block_size=1,
                    max_len=self._blueprint.max_len,
                    sliding_windows=tuple(call.window for call in calls),
                )
            )
        return made


def _tensors_of(module: nn.Module) -> list[str]:
    return [name for name, tensor in module._parameters.items() if tensor is not None]


def _places(model: Any) -> dict[str, tuple[nn.Module, str, str]]:
    """Name of each tensor of checkpoints -> its module, attribute and dtype; tied tensors once."""
    found: dict[str, tuple[nn.Module, str, str]] = {}
    wide = model._get_dtype_plan(model.dtype)
    seen: set[int] = set()
    for name, module in model.named_modules():
        persistent = {key for key in module._buffers if key not in module._non_persistent_buffers_set}
        for attribute, tensor in {**module._parameters, **{key: module._buffers[key] for key in persistent}}.items():
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            qualified = f"{name}.{attribute}".removeprefix(".")
            dtype = next((dtype for part, dtype in wide.items() if part in qualified), tensor.dtype)
            found[qualified] = module, attribute, str(dtype).removeprefix("torch.")
    return found
