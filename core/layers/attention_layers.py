"""Makes the attention of decoder layers: in its cache group, with the readers of its KV scales and sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.layers.attention import Attention, GroupedAttention
from engine.core.layers.kv_scale_reader import KVScaleReader
from engine.core.layers.sinks import SinkReader

if TYPE_CHECKING:
    from engine.core.attention.groups import CacheLayout
    from engine.core.layers.base import Layer
    from engine.core.layers.head_norm import HeadNorm, ProjectionNorm
    from engine.core.layers.layer_classes import LayerClasses
    from engine.core.layers.quant_kernels import QuantKernels


class AttentionLayers:
    """Makes the attention of a model's decoder layers for one rank."""

    def __init__(
        self,
        *,
        dtype: str,
        ranks: int,
        cache: CacheLayout | None,
        classes: LayerClasses,
        quant_kernels: QuantKernels,
        layers: list[Layer],
    ) -> None:
        """cache: which layers share block tables; None: all. layers: to which what the loader fills is appended."""
        self.kv_scales: list[KVScaleReader] = []
        """Readers of the KV scales that the checkpoint may have."""
        self.sinks: list[SinkReader] = []
        """Readers of the attention sinks of layers that have them."""
        self.made: dict[int, tuple[str, Attention | GroupedAttention]] = {}
        """By decoder layer: the name of the attention module in the checkpoint, if it was given, and the layer."""
        self._dtype = dtype
        self._ranks = ranks
        self._cache = None if cache is None or cache.one else cache
        self._classes = classes
        self._quant_kernels = quant_kernels
        self._layers = layers

    def make(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        norm: HeadNorm | ProjectionNorm | None,
        name: str,
        *,
        sinks: str,
        interleaved: bool,
    ) -> Attention | GroupedAttention:
        """Make the attention of one decoder layer; the arguments are as in LayerFactory.attention."""
        names = self._quant_kernels.kv_scale_names(name) if name else None
        if names is not None:
            scales = KVScaleReader(layer, names)
            self._layers.append(scales)
            self.kv_scales.append(scales)
        if sinks:
            reader = SinkReader(layer, sinks, num_heads * self._ranks, self._dtype)
            self._layers.append(reader)
            self.sinks.append(reader)
        group, index = self.cache_place(layer)
        attention = self._classes.attention(
            index, num_heads, num_kv_heads, head_dim, norm, interleaved=interleaved, ranks=self._ranks
        )
        made = attention if self._cache is None else GroupedAttention(attention, group)
        self.made[layer] = name, made
        return made

    def cache_place(self, layer: int) -> tuple[int, int]:
        """The number of a decoder layer's cache group, and its index in the group."""
        return (0, layer) if self._cache is None else self._cache.places[layer]
