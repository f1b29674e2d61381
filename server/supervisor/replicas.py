"""Divides the machine's devices, cores and memory among the replicas."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from attrs import evolve

from engine.core.config import AUTO, EngineConfig
from engine.core.errors import ConfigError, EngineError
from engine.core.executors import Executor
from engine.core.host import Host
from engine.core.plugin_host import load_plugins
from engine.core.runner import MEMORY_SHARE


def replica_configs(
    config: EngineConfig, count_gpus: Callable[[], int], finds_devices: Callable[[EngineConfig], bool]
) -> list[EngineConfig]:
    """The configuration of each replica: its devices, and its rank in the events of the KV cache.

    Raises ConfigError when there are too few GPUs.
    """
    configs = _with_devices(config, count_gpus, finds_devices)
    if not config.kv_events.endpoint:
        return configs
    ranks = range(config.kv_events.rank, config.kv_events.rank + len(configs))
    return [evolve(one, kv_events=evolve(one.kv_events, rank=rank)) for one, rank in zip(configs, ranks, strict=True)]


def _with_devices(
    config: EngineConfig, count_gpus: Callable[[], int], finds_devices: Callable[[EngineConfig], bool]
) -> list[EngineConfig]:
    """The configuration of each replica, with its devices.

    On GPUs, each replica gets executor.tensor_parallel consecutive GPUs, starting at executor.device; an executor that
    finds devices itself is assigned none. On a CPU, replicas share the cores and the memory equally, unless a setting
    fixes the threads or bytes per replica. A single replica keeps `config` unchanged, and no GPUs are counted.
    Raises ConfigError when there are too few GPUs.
    """
    replicas, each = config.server.replicas, config.executor.tensor_parallel
    if replicas == 1:
        return [config]
    kind, _, index = config.executor.device.partition(":")
    gpus = 0 if kind == "cpu" else count_gpus()
    if kind == "cpu" or (kind == AUTO and not gpus):
        return [_cpu_share(config)] * replicas
    if kind not in (AUTO, "cuda") or (index and not index.isdigit()):
        return [config] * replicas  # the engines refuse an unknown device with a sentence of their own
    if finds_devices(config):
        return [config] * replicas
    first = int(index or 0)
    available = max(0, gpus - first)
    if replicas * each > available:
        wanted = f"{replicas} replicas" + (f" of {each} GPUs each" if each > 1 else "")
        fits = available // each
        raise ConfigError(
            f"{wanted} need {replicas * each} GPUs from cuda:{first} on, and there are {available}; "
            + (f"use --replicas {fits}" if fits else "use --device cpu" if not available else f"use --tp {available}")
        )
    devices = [f"cuda:{first + replica * each}" for replica in range(replicas)]
    return [evolve(config, executor=evolve(config.executor, device=device)) for device in devices]


def count_gpus() -> int:
    """Number of GPUs that torch sees.

    Counted in a separate process: torch and the driver would keep memory in this one for as long as the server runs.
    Raises EngineError when they cannot be counted.
    """
    command = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"the GPUs could not be counted: {done.stderr.strip().rpartition(chr(10))[2]}")
    return int(done.stdout)


def finds_devices(config: EngineConfig) -> bool:
    """Whether the configured executor finds devices itself; `auto` chooses none that does. Raises PluginError."""
    if config.executor.name == AUTO:
        return False
    executor: type[Executor] = load_plugins(config.plugins).executors.get(config.executor.name).load()
    return executor.finds_devices


def cores() -> int:
    """Number of cores that this process may use."""
    return Host().cores()


def _cpu_share(config: EngineConfig) -> EngineConfig:
    """`config` with an equal part of the cores and the memory."""
    replicas, executor, cache = config.server.replicas, config.executor, config.cache
    threads = executor.threads or max(1, cores() // (replicas * executor.tensor_parallel))
    if cache.memory == AUTO:
        cache = evolve(cache, memory_fraction=(cache.memory_fraction or MEMORY_SHARE["cpu"]) / replicas)
    return evolve(config, executor=evolve(executor, device="cpu", threads=threads), cache=cache)
