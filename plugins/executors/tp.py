"""Tensor parallelism on one machine: one worker per device, each with its shard of every layer."""

from __future__ import annotations

from engine.core.config import EngineConfig
from engine.core.device import DeviceInfo
from engine.plugins.executors.multiproc import MultiprocExecutor, refuses_system


class TensorParallelExecutor(MultiprocExecutor):
    """As MultiprocExecutor, which does the work for any number of ranks, but chosen for several instead of one."""

    @classmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        ranks = config.executor.tensor_parallel
        if ranks == 1:
            return "it shards each layer over several devices; give their number by --tp, or use --executor multiproc"
        if device.type == "cuda":
            import torch

            available = torch.cuda.device_count() - device.index
            if ranks > available:
                return (
                    f"there are {available} GPUs from {device.torch_name} on, and --tp asks for {ranks}; "
                    f"use --tp {available}"
                )
        return refuses_system()
