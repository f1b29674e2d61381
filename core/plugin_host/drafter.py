"""What a speculator on the device needs besides its class: checkpoint, quantization method, shape, cache layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from engine.core.attention.groups import CacheLayout
from engine.core.config.tree import EngineConfig
from engine.core.errors import ConfigError
from engine.core.models.base import ModelSpec, StateShape
from engine.core.plugin_host.cache_groups import one_table_layout
from engine.core.plugin_host.derived import (
    max_len,
    refuses_ranks,
    resolve_dtype,
    resolve_kv_dtype,
    speculator_spec,
)
from engine.core.plugin_host.faults import expect
from engine.core.plugin_host.guard import owner_of
from engine.core.speculators.device import DeviceSpeculator, DrafterShape, DrafterSpec
from engine.core.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from engine.core.device import DeviceInfo
    from engine.core.models.base import Model
    from engine.core.quant.base import QuantMethod


@frozen(kw_only=True)
class DrafterParts:
    """A speculator on the device and all that is resolved for it before it is built."""

    speculator: type[DeviceSpeculator[Any]]
    options: Any
    """An instance of the speculator's options_class, or None."""
    spec: DrafterSpec
    shape: DrafterShape
    checkpoint: Checkpoint
    """The checkpoint with the speculator's weights."""
    quant: type[QuantMethod[Any]]
    quant_options: Any
    quant_owner: str
    """How errors name the quantization plugin."""
    layout: CacheLayout
    """Cache groups of the speculator's layers. All read the block table of the target's first group."""


@frozen(kw_only=True)
class DrafterChoices:
    """Chooses the plugins that a speculator on the device uses."""

    find_model: Callable[[Mapping[str, Any]], type[Model]]
    """Returns the model class of a config.json."""
    find_quant: Callable[[Mapping[str, Any]], tuple[type[QuantMethod[Any]], Any, str]]
    """Returns the quantization method of a config.json, its options, and how errors name it."""


def target_refusal(model_spec: ModelSpec) -> str | None:
    """Why no speculator on the device can draft for a model; None if one can."""
    if None not in model_spec.sliding_windows:
        return (
            "it keeps its keys and values in the blocks of the model's layers with full attention, and all layers of"
            " this model have a sliding window; use a speculator on the host"
        )
    return None


def resolve_drafter(
    speculator: type[DeviceSpeculator[Any]],
    options: Any,
    config: EngineConfig,
    target: ModelSpec,
    target_config: Mapping[str, Any],
    device: DeviceInfo,
    choices: DrafterChoices,
) -> DrafterParts:
    """Resolve what the speculator needs. target: spec of the model that verifies; target_config: its config.json.

    Raises CheckpointError, ConfigError or PluginError.
    """
    limits = speculator_spec(config, target)
    checkpoint = Checkpoint.open(config.speculator.model or config.model.path)
    spec = DrafterSpec(
        vocab_size=limits.vocab_size,
        max_len=limits.max_len,
        max_drafts=limits.max_drafts,
        target=target,
        target_path=Path(config.model.path),
        path=checkpoint.path,
        config=checkpoint.config,
        find_model=choices.find_model,
    )
    owner = owner_of(speculator)
    shape = speculator.shape(spec, options)
    expect(isinstance(shape, DrafterShape), owner, "shape()", shape, "a DrafterShape")
    if any(isinstance(cache, StateShape) for cache in shape.model_spec.layer_caches):
        raise ConfigError(
            f"layers of the speculator's model in {checkpoint.path} keep a state, which cannot go back to the last"
            " accepted token; use a model with attention alone"
        )
    beyond = [layer for layer in shape.hidden_layers if not 0 <= layer <= target.num_layers]
    if beyond:
        raise ConfigError(
            f"the speculator in {checkpoint.path} computes with the hidden states entering layers"
            f" {', '.join(map(str, shape.hidden_layers))}, and the model has {target.num_layers} layers; use one that"
            " was trained for this model"
        )
    ranks = config.executor.tensor_parallel
    refusal = refuses_ranks(shape.model_spec, ranks)
    if refusal is not None:
        raise ConfigError(f"the speculator's model in {checkpoint.path} cannot be shared: {refusal}")
    quant, quant_options, quant_owner = choices.find_quant(checkpoint.config)
    dtype = resolve_dtype(config, target_config, device)
    kv_dtype = resolve_kv_dtype(config, dtype, checkpoint.config, quant, device)
    layout = one_table_layout(shape.model_spec, config, dtype, max_len(config, target), kv_dtype, ranks)
    return DrafterParts(
        speculator=speculator,
        options=options,
        spec=spec,
        shape=shape,
        checkpoint=checkpoint,
        quant=quant,
        quant_options=quant_options,
        quant_owner=quant_owner,
        layout=layout,
    )
