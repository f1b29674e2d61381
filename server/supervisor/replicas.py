"""What each replica of the engine is given of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from attrs import evolve

from engine.core.config import AUTO, EngineConfig
from engine.core.errors import ConfigError, EngineError
from engine.core.executors import Executor
from engine.core.plugin_host import load_plugins
from engine.core.runner import MEMORY_SHARE


def replica_configs(
    config: EngineConfig, count_gpus: Callable[[], int], finds_devices: Callable[[EngineConfig], bool]
) -> list[EngineConfig]:
    """The configuration of each replica.

    GPUs: a replica has executor.tensor_parallel of them, the first one's begin at executor.device; an executor that
    finds devices itself is told none. CPU: they share the cores and the memory, where no setting says how many threads
    or bytes each gets.
    Raises ConfigError when there are too few GPUs. One replica has what one engine has, and nothing is counted.
    """
    replicas, each = config.server.replicas, config.executor.tensor_parallel
    if replicas == 1:
        return [config]
    kind, _, index = config.executor.device.partition(":")
    gpus = 0 if kind == "cpu" else count_gpus()
    if kind == "cpu" or (kind == AUTO and not gpus):
        return [_share(config)] * replicas
    if kind not in (AUTO, "cuda") or (index and not index.isdigit()):
        return [config] * replicas  # which the engines refuse, in their own words
    if finds_devices(config):
        return [config] * replicas
    first = int(index or 0)
    there = max(0, gpus - first)
    if replicas * each > there:
        wanted = f"{replicas} replicas" + (f" of {each} GPUs each" if each > 1 else "")
        fits = there // each
        raise ConfigError(
            f"{wanted} need {replicas * each} GPUs from cuda:{first} on, and there are {there}; "
            + (f"use --replicas {fits}" if fits else "use --device cpu" if not there else f"use --tp {there}")
        )
    devices = [f"cuda:{first + replica * each}" for replica in range(replicas)]
    return [evolve(config, executor=evolve(config.executor, device=device)) for device in devices]


def count_gpus() -> int:
    """GPUs that torch sees, asked in a process of its own: here torch and the driver would take memory for good."""
    command = [sys.executable, "-P", "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"the GPUs could not be counted: {done.stderr.strip().rpartition(chr(10))[2]}")
    return int(done.stdout)


def finds_devices(config: EngineConfig) -> bool:
    """Executor.finds_devices of the one that is named; auto takes none that does. Raises PluginError."""
    if config.executor.name == AUTO:
        return False
    executor: type[Executor] = load_plugins(config.plugins).executors.get(config.executor.name).load()
    return executor.finds_devices


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _share(config: EngineConfig) -> EngineConfig:
    """An equal part of the CPU."""
    replicas, executor, cache = config.server.replicas, config.executor, config.cache
    threads = executor.threads or max(1, cores() // (replicas * executor.tensor_parallel))
    if cache.memory == AUTO:
        cache = evolve(cache, memory_fraction=(cache.memory_fraction or MEMORY_SHARE["cpu"]) / replicas)
    return evolve(config, executor=evolve(executor, device="cpu", threads=threads), cache=cache)
