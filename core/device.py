"""Describes a device as plain data, so that a plugin can refuse a device without importing torch."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from engine.core.errors import ConfigError
from engine.core.host import Host

DeviceType = Literal["cpu", "cuda"]


@frozen(kw_only=True)
class DeviceInfo:
    """A CPU or one GPU."""

    type: DeviceType
    """As torch names the type: a ROCm GPU is "cuda" too."""
    index: int = 0
    name: str = ""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None on a CPU, and on a ROCm GPU, whose version numbers are not comparable."""
    memory_bytes: int = 0
    """Total memory, in use or not."""

    @property
    def torch_name(self) -> str:
        """Argument of torch.device."""
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


def find_device(wanted: str) -> DeviceInfo:
    """The device named by a setting: auto (a GPU if there is one), cpu, cuda or cuda:N. Imports torch.

    Raises ConfigError for an unknown name or a GPU that does not exist.
    """
    import torch

    name, _, index = wanted.partition(":")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu" and not index:
        host = Host()
        return DeviceInfo(type="cpu", name=host.cpu_name(), memory_bytes=host.total_memory())
    if name != "cuda" or (index and not index.isdigit()):
        raise ConfigError(f"device {wanted!r} is unknown; use auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {wanted!r} is not available: torch {torch.__version__} sees no GPU; use --device cpu"
        )
    number = int(index or 0)
    if number >= torch.cuda.device_count():
        raise ConfigError(f"device {wanted!r} is not available: there are only {torch.cuda.device_count()} GPUs")
    properties = torch.cuda.get_device_properties(number)
    return DeviceInfo(
        type="cuda",
        index=number,
        name=properties.name,
        capability=None if torch.version.hip else (properties.major, properties.minor),
        memory_bytes=properties.total_memory,
    )
