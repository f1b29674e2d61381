"""Scales of a float8 KV cache, from the largest keys and values over the calibration text."""

from __future__ import annotations

import math

import torch

from engine.core.errors import CheckpointError
from engine.core.quant import FLOAT8_MAX, KVScales


class KVPeaks:
    """Stands in for the cache of a decoder layer in transformers, and keeps only the largest magnitudes.

    A cache receives keys after their norm, if there is one, and the rotary embedding, as the engine stores them.
    """

    def __init__(self) -> None:
        self.key: torch.Tensor | None = None
        """The largest |key| so far, of all heads. None: no keys yet; NaN: a key was NaN."""
        self.value: torch.Tensor | None = None
        """The largest |value| so far, likewise."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record keys and values, of any shape, and return them unchanged for attention."""
        self.key, self.value = (
            largest if before is None else torch.maximum(before, largest)
            for before, largest in ((self.key, keys.abs().amax()), (self.value, values.abs().amax()))
        )
        return keys, values

    def scales(self, layer: str) -> KVScales:
        """The scales by which the largest magnitudes become FLOAT8_MAX; 1 if all were 0.

        Float8 has the same relative precision over most of its range, so that a search for the scales of the least
        error finds nothing worth its time. layer: its name, for messages. Raises CheckpointError if the layer
        cached nothing, or magnitudes are not finite.
        """
        if self.key is None or self.value is None:
            raise CheckpointError(
                f"{layer} gives its keys and values to no cache of transformers' kind, so that no scales can be found"
                " for them; leave out --kv-cache"
            )
        return KVScales(key=_scale(self.key, f"keys of {layer}"), value=_scale(self.value, f"values of {layer}"))


def _scale(peak: torch.Tensor, what: str) -> float:
    largest = float(peak)
    if not math.isfinite(largest):
        raise CheckpointError(f"{what} become {largest} over the calibration text, which no scale can store")
    return largest / FLOAT8_MAX or 1.0
