"""The layer that reads the scales of a quantized KV cache from the checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from engine.core.errors import CheckpointError
from engine.core.layers.base import Layer
from engine.core.quant.base import KVScaleNames, TensorSpec
from engine.core.quant.float8 import FLOAT8, FLOAT8_MAX, UNSCALED, KVScales

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionSpec

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")


class KVScaleReader(Layer):
    """The KV scales of one attention layer, if the checkpoint has them. Every rank reads both."""

    def __init__(self, layer: int, names: KVScaleNames) -> None:
        self.layer = layer
        self.scales: KVScales | None = None
        """None before `fill`, and if the checkpoint has no scales."""
        self.names = names

    def tensors(self) -> Mapping[str, TensorSpec]:
        names = (*self.names.keys, *self.names.values)
        return {name: TensorSpec(shape=(1,), dtypes=DTYPES, optional=True) for name in names}

    def fill(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Keep the scales as numbers, which kernels take as launch arguments.

        Raises CheckpointError if only one of the two is there, or one is not positive and finite.
        """
        key, value = (self._read(names, loaded) for names in (self.names.keys, self.names.values))
        if key is not None and value is not None:
            self.scales = KVScales(key=key, value=value)
        elif key is not None or value is not None:
            missing = self.names.keys if key is None else self.names.values
            raise CheckpointError(
                f"the checkpoint scales only one of keys and values: it lacks {' or '.join(missing)}; fetch it again"
            )

    def _read(self, names: tuple[str, ...], loaded: Mapping[str, torch.Tensor]) -> float | None:
        for name in names:
            if name in loaded:
                scale = loaded[name].item()
                if not (math.isfinite(scale) and scale > 0):
                    raise CheckpointError(f"tensor {name} is {scale}; a scale is a positive number")
                return float(scale)
        return None

    @property
    def nbytes(self) -> int:
        return 0


def find_kv_scales(spec: AttentionSpec, readers: Sequence[KVScaleReader]) -> tuple[KVScales, ...]:
    """The KV scales of every layer: 1 where the checkpoint has none; empty if the cache is not in float8.

    Logs a warning if scales are missing, or present and not used.
    """
    found = {reader.layer: reader.scales for reader in readers if reader.scales is not None}
    if spec.kv_dtype != FLOAT8:
        if found:
            log.warning(
                "the checkpoint has scales for keys and values in %s, which are not used: the KV cache is in %s;"
                " --kv-dtype %s would use them",
                FLOAT8,
                spec.kv_dtype,
                FLOAT8,
            )
        return ()
    if len(found) < spec.num_layers:
        log.warning(
            "the checkpoint has no scales for the keys and values of %d of %d layers, which are kept in %s with scale"
            " 1: values beyond %g are clipped, and small values lose precision; use a checkpoint with calibrated"
            " scales (kv_cache_scheme), or --kv-dtype %s",
            spec.num_layers - len(found),
            spec.num_layers,
            FLOAT8,
            FLOAT8_MAX,
            spec.dtype,
        )
    return tuple(found.get(layer, UNSCALED) for layer in range(spec.num_layers))
