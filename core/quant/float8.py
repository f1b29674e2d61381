"""float8 (e4m3): its largest value, which GPUs have it, and the scales of a float8 KV cache.

A quantized value is x / scale, rounded to the nearest float8 and saturated at +-FLOAT8_MAX. Dequantizing multiplies by
the scale. A layer has one scale for its keys and one for its values; a cache of another dtype has scales of 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch

    from engine.core.device import DeviceInfo

FLOAT8 = "float8_e4m3fn"
FLOAT8_MAX = 448.0
"""The largest finite float8."""
FLOAT8_CAPABILITY = (8, 9)
"""From this CUDA compute capability on, GPUs convert and multiply float8."""


def has_float8(device: DeviceInfo) -> bool:
    """Whether a device is a GPU that computes with float8."""
    return device.capability is not None and device.capability >= FLOAT8_CAPABILITY


@frozen(kw_only=True)
class KVScales:
    """The scales of one layer's keys and values, positive and finite."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def quantize_float8(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Quantize a tensor of any shape to float8_e4m3fn. NaN stays NaN.

    The cast alone would turn values beyond FLOAT8_MAX into NaN.
    """
    import torch

    return (values.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
