"""The layer that reads the attention sinks of a decoder layer from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import evolve

from engine.core.errors import PluginError
from engine.core.layers.base import TensorLayer
from engine.core.quant.base import TensorSpec

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionSpec


class SinkReader(TensorLayer):
    """The sinks of one layer's query heads, of which a rank reads its own: [heads], in float32 once loaded."""

    def __init__(self, layer: int, name: str, num_heads: int, dtype: str) -> None:
        """num_heads: over all ranks."""
        super().__init__(name, (num_heads,), dtype)
        self.layer = layer

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {name: evolve(spec, shard_dim=0) for name, spec in super().tensors().items()}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        self.weight = loaded[self.name].float()


def find_sinks(spec: AttentionSpec, readers: Sequence[SinkReader], owner: str) -> tuple[torch.Tensor | None, ...]:
    """The sinks of every layer, for `AttentionBackend.set_sinks`; empty if no layer has sinks.

    owner: the model, as errors name it. Raises PluginError if its layers are not those that its spec names.
    """
    found = {reader.layer: reader.weight for reader in readers}
    named = {layer for layer, has_sinks in enumerate(spec.sinks) if has_sinks}
    if found.keys() != named:
        raise PluginError(
            f"{owner} has made layers with attention sinks ({_listed(found)}) that are not those in the sinks of its"
            f" spec() ({_listed(named)}); make the two the same"
        )
    return tuple(found.get(layer) for layer in range(spec.num_layers)) if found else ()


def _listed(layers: Mapping[int, object] | set[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "no layer"
