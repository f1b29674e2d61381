"""What core asks the classes of plugins before it chooses one: whether they refuse, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve

from engine.core.attention.base import AttentionSpec
from engine.core.attention.pair import AttentionPair
from engine.core.config.setting import changed_settings
from engine.core.config.tree import AUTO, EngineConfig
from engine.core.errors import ConfigError, EngineError, PluginError
from engine.core.models.base import KVShape, StateShape
from engine.core.plugin_host.cache_groups import cache_layout
from engine.core.plugin_host.derived import (
    max_len,
    refuses_ranks,
    resolve_dtype,
    resolve_kv_dtype,
    shape_of,
    speculator_spec,
)
from engine.core.plugin_host.drafter import DrafterParts, target_refusal
from engine.core.quant.float8 import FLOAT8
from engine.core.speculators.device import DeviceSpeculator
from engine.core.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.device import DeviceInfo
    from engine.core.models.base import Model
    from engine.core.parsers.base import Templates
    from engine.core.quant.base import QuantMethod

Question = Callable[[Any], str | None]
"""Asks a plugin's class whether it refuses; returns its refusal, a sentence, or None."""


def model_question(checkpoint: Mapping[str, Any]) -> Question:
    """Asks whether a model class refuses this config.json."""
    return lambda cls: cls.refuses(checkpoint)


def served_model_question(
    config: EngineConfig, device: DeviceInfo, checkpoint: Mapping[str, Any], find: Callable[[str, Question], Any]
) -> Question:
    """Asks whether a model class refuses this config.json, and whether an attention backend reads its latent keys.

    For auto: where none does, another model class may serve the checkpoint with keys and values per head. find: returns
    the class that would be chosen for a section, and raises PluginError if there is none.
    """

    def attention_refusal(cls: Any) -> str | None:
        try:
            caches = shape_of(cls, checkpoint).layer_caches
            if not any(isinstance(cache, KVShape) and cache.latent for cache in caches):
                return None
            quant = find("quant", quant_question(checkpoint, device))
            question = attention_question(config, device, checkpoint, cls, quant)
        except EngineError:  # not this question's: `resolve` raises the error once it has chosen the class at fault
            return None
        try:
            find("attention", question)
        except PluginError as error:
            return f"its keys are latent, and {error}"
        return None

    def question(cls: Any) -> str | None:
        refusal: str | None = cls.refuses(checkpoint)
        return attention_refusal(cls) if refusal is None else refusal

    return question


def quant_question(checkpoint: Mapping[str, Any], device: DeviceInfo) -> Question:
    """Asks whether a quantization method refuses this config.json."""
    return lambda cls: cls.refuses(checkpoint.get("quantization_config"), device)


def attention_question(
    config: EngineConfig,
    device: DeviceInfo,
    checkpoint: Mapping[str, Any],
    model: type[Model],
    quant: type[QuantMethod[Any]],
    drafter: DrafterParts | None = None,
) -> Question:
    """Asks whether an attention backend refuses this model with this quantization. drafter: the layers of a speculator
    on the device, which the same backend serves; None: there are none.

    Raises CheckpointError or ConfigError, and PluginError for a model class that cannot describe its shape.
    """
    shape, ranks = shape_of(model, checkpoint), config.executor.tensor_parallel
    refusal = refuses_ranks(shape, ranks)
    if refusal is not None:
        raise ConfigError(refusal)
    if not shape.has_attention:
        _refuse_cache_settings(config)
        refusal = "all layers of this model keep a state, and none has attention"
        if config.attention.name != AUTO:
            refusal += "; leave attention.name (--attention) out"
        return lambda cls: refusal
    dtype = resolve_dtype(config, checkpoint, device)
    kv_dtype = resolve_kv_dtype(config, dtype, checkpoint, quant, device)
    layout = cache_layout(shape, config, dtype, max_len(config, shape), kv_dtype, ranks)
    groups = (*layout.groups, *(() if drafter is None else drafter.layout.groups))
    specs = tuple(dict.fromkeys(group.spec for group in groups))

    def question(cls: Any) -> str | None:
        for spec in specs:
            refusal: str | None = cls.refuses(spec, device)
            if refusal is None:
                refusal = _core_refusal(cls, spec)
            if refusal is not None:
                return refusal
        return None

    return question


def speculator_question(config: EngineConfig, checkpoint: Mapping[str, Any], model: type[Model]) -> Question:
    """Asks whether a speculator refuses this model. Raises as `attention_question`."""
    model_spec = shape_of(model, checkpoint)
    own = config.speculator.model
    drafts = Checkpoint.open(own).config if own else None
    spec = evolve(speculator_spec(config, model_spec), config=drafts, target_config=checkpoint)
    has_state = any(isinstance(cache, StateShape) for cache in model_spec.layer_caches)

    def question(cls: Any) -> str | None:
        if has_state:
            return (
                "layers of this model keep a state, which cannot go back to the last accepted token when a draft is "
                "rejected; leave the speculator out"
            )
        refusal: str | None = None
        if issubclass(cls, DeviceSpeculator):
            refusal = target_refusal(model_spec)
        elif own or config.speculator.quant != AUTO:
            return (
                "it runs on the host and has no checkpoint, but speculator.model (--speculator-model) or"
                " speculator.quant is set; leave both out, or choose a speculator that runs on the device"
            )
        return cls.refuses(spec) if refusal is None else refusal

    return question


def parser_question(templates: Templates, *, by_auto: bool) -> Question:
    """Asks whether an output parser refuses a tokenizer; by_auto: also whether it recognizes the format."""

    def question(cls: Any) -> str | None:
        refusal: str | None = cls.refuses(templates)
        if refusal is None and by_auto and not cls.recognizes(templates):
            return "the tokenizer's templates do not write its format; name it (--parser) if the model does"
        return refusal

    return question


def questions_of_machine(config: EngineConfig, device: DeviceInfo) -> dict[str, Question]:
    """Section -> question, for the extension points that depend on no model. device: the executor's first device."""
    return {
        "scheduler": lambda cls: cls.refuses(),
        "executor": lambda cls: cls.refuses(config, device),
        "grammar": lambda cls: cls.refuses(),
    }


def _refuse_cache_settings(config: EngineConfig) -> None:
    """Raise ConfigError for settings of the KV cache, where all layers of the model keep a state."""
    for name in changed_settings(config.cache):
        if name not in ("memory_fraction", "prefix_caching"):
            raise ConfigError(
                f"cache.{name} is set, but all layers of this model keep a state, and none has a KV cache; remove it;"
                " --max-running sets how many states are allocated"
            )
    if config.attention.options:
        raise ConfigError(
            "attention.options is set, but all layers of this model keep a state, and none has attention; leave it out"
        )


def _core_refusal(cls: type[AttentionBackend[Any, Any]] | AttentionPair, spec: AttentionSpec) -> str | None:
    """What core refuses for a backend: what core does not serve, and what the class does not declare."""
    if spec.latent and spec.kv_dtype == FLOAT8:
        return f"core writes no latent KV cache in {FLOAT8}; use --kv-dtype {spec.dtype}"
    if spec.kv_dtype == FLOAT8 and not cls.reads_float8:
        return f"it reads no KV cache in {FLOAT8}; use --kv-dtype {spec.dtype} or another backend"
    if any(spec.sinks) and not cls.reads_sinks:
        return "it does not compute attention sinks, which this model has; use --attention auto or another backend"
    if (spec.latent or spec.value_head_dim is not None) and not cls.reads_latent:
        return (
            f"it reads no values of {spec.output_dim} numbers with keys of {spec.head_dim}, as this model has; use "
            "another backend"
        )
    if cls.block_sizes is None or spec.block_size in cls.block_sizes:
        return None
    sizes = " or ".join(map(str, cls.block_sizes))
    return (
        f"it reads KV blocks of {sizes} tokens, not {spec.block_size}; set cache.block_size (--block-size) to {sizes}"
    )
