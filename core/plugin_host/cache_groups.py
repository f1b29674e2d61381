"""Derives the cache groups of a model: which layers share blocks, and which keep a state instead."""

from __future__ import annotations

from attrs import evolve

from engine.core.attention.base import AttentionSpec
from engine.core.attention.groups import CacheGroup, CacheLayout, StateGroup, divide_layers
from engine.core.config.tree import EngineConfig
from engine.core.models.base import KVShape, ModelSpec, StateShape
from engine.core.plugin_host.derived import attention_spec
from engine.core.types import BlockKind


def cache_layout(
    model_spec: ModelSpec, config: EngineConfig, dtype: str, max_len: int, kv_dtype: str, ranks: int = 1
) -> CacheLayout:
    """The cache groups of one of `ranks` ranks. A window of at least `max_len` hides nothing, so it is none."""
    base = attention_spec(model_spec, config, dtype, max_len, kv_dtype, ranks)
    states: dict[StateShape, list[int]] = {}
    kinds: dict[AttentionSpec, list[int]] = {}  # by the spec of one layer
    for layer, window in enumerate(model_spec.sliding_windows):
        cache = model_spec.layer_caches[layer] if model_spec.layer_caches else None
        if isinstance(cache, StateShape):
            states.setdefault(cache, []).append(layer)
            continue
        visible = None if window is None or window >= max_len else window
        kinds.setdefault(_layer_spec(base, cache, visible, ranks), []).append(layer)
    block_kinds, groups = [], []
    for spec, layers in sorted(kinds.items(), key=lambda kind: kind[0].sliding_windows != (None,)):
        size = _layers_per_block(spec, kinds)
        parts = [tuple(layers[start : start + size]) for start in range(0, len(layers), size)]
        groups += [CacheGroup(layers=part, spec=_spec_of(part, spec, base)) for part in parts]
        block_kinds.append(_block_kind(spec, groups=len(parts), layers=len(layers)))
    state_groups = [StateGroup(layers=tuple(layers), tensors=cache.on_rank(ranks)) for cache, layers in states.items()]
    members: list[CacheGroup | StateGroup] = [*groups, *state_groups]
    places = {
        layer: (number, index) for number, group in enumerate(members) for index, layer in enumerate(group.layers)
    }
    return CacheLayout(
        kinds=tuple(block_kinds),
        groups=tuple(groups),
        states=tuple(state_groups),
        places=tuple(places[layer] for layer in range(model_spec.num_layers)),
    )


def one_table_layout(
    model_spec: ModelSpec, config: EngineConfig, dtype: str, max_len: int, kv_dtype: str, ranks: int = 1
) -> CacheLayout:
    """The cache groups of a speculator's model without states, whose layers all use one block table of the target's.

    A group has all layers of one shape and window, and memory of its own. The layout has no block kinds.
    """
    base = attention_spec(model_spec, config, dtype, max_len, kv_dtype, ranks)
    members: dict[AttentionSpec, list[int]] = {}
    for layer, window in enumerate(model_spec.sliding_windows):
        cache = model_spec.layer_caches[layer] if model_spec.layer_caches else None
        assert not isinstance(cache, StateShape), "a speculator's layers have no states"
        visible = None if window is None or window >= max_len else window
        members.setdefault(_layer_spec(base, cache, visible, ranks), []).append(layer)
    groups = tuple(
        CacheGroup(layers=tuple(layers), spec=_spec_of(tuple(layers), spec, base)) for spec, layers in members.items()
    )
    places = {layer: (number, index) for number, group in enumerate(groups) for index, layer in enumerate(group.layers)}
    return CacheLayout(
        kinds=(), groups=groups, states=(), places=tuple(places[layer] for layer in range(model_spec.num_layers))
    )


def _layers_per_block(spec: AttentionSpec, kinds: dict[AttentionSpec, list[int]]) -> int:
    """The number of layers that a block has room for, for the kinds that share memory with `spec`."""
    counts: dict[bool, list[int]] = {}
    for other, layers in kinds.items():
        if other.numbers_per_token == spec.numbers_per_token:
            counts.setdefault(other.sliding_windows != (None,), []).append(len(layers))
    return divide_layers(counts)


def _block_kind(spec: AttentionSpec, *, groups: int, layers: int) -> BlockKind:
    [window] = spec.sliding_windows
    name = "latent" if spec.latent else "full"
    return BlockKind(name=name if window is None else f"window {window}", window=window, groups=groups, layers=layers)


def _spec_of(layers: tuple[int, ...], spec: AttentionSpec, base: AttentionSpec) -> AttentionSpec:
    """The spec of a group. spec: that of each of its layers. base: that of the whole model, for the layers' sinks."""
    sinks = tuple(base.sinks[layer] for layer in layers) if base.sinks else ()
    return evolve(
        spec,
        num_layers=len(layers),
        sliding_windows=spec.sliding_windows * len(layers),
        sinks=sinks if any(sinks) else (),
    )


def _layer_spec(base: AttentionSpec, cache: KVShape | None, window: int | None, ranks: int) -> AttentionSpec:
    """The attention of one layer on one rank."""
    spec = evolve(base, num_layers=1, sliding_windows=(window,), sinks=())
    if cache is None:
        return spec
    return evolve(
        spec,
        num_heads=cache.num_heads // ranks,
        num_kv_heads=cache.num_kv_heads if cache.latent else max(cache.num_kv_heads // ranks, 1),
        head_dim=cache.head_dim,
        value_head_dim=cache.value_head_dim,
        latent=cache.latent,
        scale=base.scale if cache.scale is None else cache.scale,
    )
