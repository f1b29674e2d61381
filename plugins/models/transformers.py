"""The fallback: any decoder of the transformers library that calls attention by the library's interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from engine.core.errors import CheckpointError
from engine.core.models import KVShape, Model, ModelSpec
from engine.plugins.models.config_keys import NEUTRAL
from engine.plugins.models.fallback.build import Built
from engine.plugins.models.fallback.errors import RefusedError
from engine.plugins.models.fallback.library import architecture_of, unknown_keys, version
from engine.plugins.models.fallback.trace import Blueprint, blueprint

if TYPE_CHECKING:
    from engine.core.layers import LayerFactory
    from engine.core.models import ForwardPass


class Transformers(Model):
    """A decoder run by transformers' code, on the engine's KV cache, batches, linear layers and ranks."""

    api: ClassVar[str] = "2"

    @classmethod
    def refuses(cls, config: Mapping[str, Any]) -> str | None:
        """Refuses architectures that the library lacks, and those whose forward needs more than the KV cache."""
        try:
            shape = blueprint(config)
            _model_spec(shape)
            _refuse_keys(config)
            if shape.experts and config.get("quantization_config"):
                raise RefusedError("has quantized experts, which the library's code cannot compute here")
        except RefusedError as error:
            named = config.get("architectures")
            what = named[0] if isinstance(named, list) and named else f"the model_type {config.get('model_type')!r}"
            return f"{what} {error}"
        return None

    @classmethod
    def unknown_keys(cls, config: Mapping[str, Any]) -> Sequence[str]:
        return unknown_keys(config)

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        try:
            return _model_spec(blueprint(config))
        except RefusedError as error:
            raise CheckpointError(f"this model {error}") from error

    def __init__(self, config: Mapping[str, Any], layers: LayerFactory, options: Any = None) -> None:
        try:
            shape = blueprint(config)
            self._built = Built(config, shape, layers)
        except RefusedError as error:
            raise CheckpointError(f"{architecture_of(config)} {error}") from error
        self._head = self._built.head
        self.experts = shape.experts
        """Whether the library's own expert modules compute a part."""
        if shape.waits is not None:
            self.no_graphs = f"waits for the device in the middle of its forward ({shape.waits})"

    def forward(self, run: ForwardPass) -> torch.Tensor:
        return self._built.forward(run)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden)

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._head.layer.greedy(hidden) if self._head.is_plain else super().greedy(hidden)


def _model_spec(shape: Blueprint) -> ModelSpec:
    """The shape of attention. Raises RefusedError for soft caps that differ between layers."""
    calls, first = shape.calls, shape.calls[0]
    if any(call.arguments.softcap != first.arguments.softcap for call in calls):
        raise RefusedError("has attention layers with different soft caps, which no backend computes")
    sinks = tuple(call.arguments.sinks is not None for call in calls)
    caches = tuple(
        KVShape(num_heads=call.heads, num_kv_heads=call.kv_heads, head_dim=call.key_dim, scale=call.arguments.scale)
        for call in calls
    )
    return ModelSpec(
        num_layers=len(calls),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=first.key_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_len=shape.max_len,
        sliding_windows=tuple(call.window for call in calls),
        scale=first.arguments.scale,
        softcap=first.arguments.softcap,
        layer_caches=caches if len(set(caches)) > 1 else (),
        sinks=sinks if any(sinks) else (),
    )


def _refuse_keys(config: Mapping[str, Any]) -> None:
    """Refuse keys that change what other programs compute, and that the library's class does not know."""
    for key in unknown_keys(config):
        if key in NEUTRAL and config[key] not in NEUTRAL[key]:
            raise RefusedError(f"has {key}: {config[key]!r} in config.json, which {version()} does not compute")
