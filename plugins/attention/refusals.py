"""Refusals that several backends share."""

from __future__ import annotations

from engine.core.attention import AttentionSpec
from engine.core.device import DeviceInfo
from engine.core.quant import FLOAT8, FLOAT8_CAPABILITY, has_float8

MIN_CAPABILITY = (8, 0)
"""Compute capability from which on the kernels for NVIDIA GPUs run."""


def capability_refusal(device: DeviceInfo) -> str | None:
    """Return why kernels for NVIDIA GPUs cannot run on a GPU of this compute capability; None if they can."""
    if device.capability is None or device.capability >= MIN_CAPABILITY:
        return None
    return f"it needs compute capability {_dotted(MIN_CAPABILITY)}, and {_has(device)}; use another backend"


def kv_dtype_refusal(spec: AttentionSpec) -> str | None:
    """Return why keys and values in this dtype cannot be read, by a backend that reads those of float8 and of the
    activations; None if they can."""
    if spec.kv_dtype in (spec.dtype, FLOAT8):
        return None
    return (
        f"keys and values must have the type of the activations ({spec.dtype}) or {FLOAT8}, not {spec.kv_dtype}; use"
        f" --kv-dtype auto or {FLOAT8}"
    )


def float8_refusal(spec: AttentionSpec, device: DeviceInfo) -> str | None:
    """Return why a GPU cannot read the KV cache, as it is in float8; None if it can."""
    if spec.kv_dtype != FLOAT8 or device.capability is None or has_float8(device):
        return None
    return f"{FLOAT8} needs compute capability {_dotted(FLOAT8_CAPABILITY)}, and {_has(device)}; use --kv-dtype auto"


def _has(device: DeviceInfo) -> str:
    return f"{device.torch_name} has {_dotted(device.capability or ())}"


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))
