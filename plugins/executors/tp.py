"""Tensor parallelism: a worker a device, each with its share of every layer; all see every step, and rank 0 answers."""

from __future__ import annotations

from engine.core.config import EngineConfig
from engine.core.device import DeviceInfo
from engine.plugins.executors.multiproc import MultiprocExecutor, refuses_system


class TensorParallelExecutor(MultiprocExecutor):
    """MultiprocExecutor with several ranks."""

    @classmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        """A single device, and more devices than there are."""
        ranks = config.executor.tensor_parallel
        if ranks == 1:
            return "it shares each layer among several devices; give their number by --tp, or use --executor multiproc"
        if device.type == "cuda":
            import torch

            there = torch.cuda.device_count() - device.index
            if ranks > there:
                return f"there are {there} GPUs from {device.torch_name} on, and --tp wants {ranks}; use --tp {there}"
        return refuses_system()
