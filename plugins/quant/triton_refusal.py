"""Refuses GPUs on which a method's kernels cannot run."""

from __future__ import annotations

from importlib.util import find_spec

from engine.core.device import DeviceInfo


def triton_refusal(device: DeviceInfo) -> str | None:
    """Return why the kernels of quantized layers cannot run on a device; None if they can."""
    if device.type == "cuda" and find_spec("triton") is None:
        return "its kernels for GPUs are written in Triton, which is not installed; install triton"
    return None
