"""The peaks of a device: given by the configuration, or its maker's for GPUs whose names are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.errors import ConfigError
from engine.core.profiling.cost import Peaks

if TYPE_CHECKING:
    from engine.core.config.tree import RooflineConfig
    from engine.core.device import DeviceInfo

TERA = 1e12
KNOWN: dict[str, tuple[float, float, float]] = {
    "NVIDIA B200": (8.0, 2250, 4500),
    "NVIDIA H200": (4.8, 989, 1979),
    "NVIDIA H100 80GB HBM3": (3.35, 989, 1979),
    "NVIDIA H100 NVL": (3.9, 835, 1671),
    "NVIDIA H100 PCIe": (2.0, 756, 1513),
    "NVIDIA A100-SXM4-80GB": (2.039, 312, 624),
    "NVIDIA A100-SXM4-40GB": (1.555, 312, 624),
    "NVIDIA A100 80GB PCIe": (1.935, 312, 624),
    "NVIDIA A100-PCIE-40GB": (1.555, 312, 624),
    "NVIDIA L40S": (0.864, 362, 733),
    "NVIDIA L4": (0.3, 121, 242),
}
"""Name of a GPU -> TB/s, TFLOP/s of dense matrix products of 16-bit and of 8-bit numbers, by its data sheet."""
SIXTEEN_BITS = ("bfloat16", "float16")


def find_peaks(config: RooflineConfig, device: DeviceInfo, dtype: str) -> Peaks | None:
    """The peaks of a device for a model in `dtype`; None: the device is not known, and none are given.

    What the configuration gives takes precedence. Raises ConfigError where one peak is given and another is
    not known.
    """
    given = (config.bandwidth, config.flops, config.flops8)
    bandwidth, flops, flops8 = KNOWN.get(device.name, (0.0, 0.0, 0.0))
    known = (bandwidth, flops if dtype in SIXTEEN_BITS else 0.0, flops8)
    sources = []
    if any(sheet and not one for one, sheet in zip(given, known, strict=True)):
        sources.append(f"data sheet of {device.name}")
    if any(given):
        sources.append("as given")
    bandwidth, flops, flops8 = (one or sheet for one, sheet in zip(given, known, strict=True))
    if bandwidth and flops:
        return Peaks(
            bandwidth=bandwidth * TERA,
            flops=flops * TERA,
            flops8=flops8 * TERA or None,
            source=", ".join(sources),
        )
    if any(given):
        missing = "roofline.flops (--peak-flops)" if bandwidth else "roofline.bandwidth (--peak-bandwidth)"
        raise ConfigError(
            f"{missing} is not given, and the peaks of {device.name or device.torch_name} with {dtype} are not known;"
            " give both, as `engine bench latency` measures them"
        )
    return None
