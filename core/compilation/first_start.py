"""Distinguishes the first start of a configuration, whose kernels have to be compiled, from later ones.

A start that has completed leaves a mark in Triton's cache directory, so that kernels and mark are deleted together.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import engine

if TYPE_CHECKING:
    from engine.core.config.tree import EngineConfig

log = logging.getLogger(__name__)

MARKS = "engine-starts"
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver describes each GPU, in a file `information`."""
KERNELS = ("ops", "core/layers", "core/sampling", "plugins")
"""Folders of the package with kernels, or with what chooses them."""


def begin_first_start(config: EngineConfig) -> None:
    """Start the compile server if this process, which will run the model, needs it.

    Called before torch is imported, so that both happen at the same time.
    """
    if may_use_gpu(config) and is_first_start(config):
        from engine.core.compilation.client import SHARED

        SHARED.begin()


def is_first_start(config: EngineConfig) -> bool:
    """Whether no earlier start has completed with the same kernels: equal settings that choose kernels, versions,
    sources, Triton cache and GPU models."""
    return not os.path.exists(_mark(config))  # a directory that cannot be read counts as a first start


def mark_started(config: EngineConfig) -> None:
    """Note that the kernels of a configuration are on disk."""
    mark = _mark(config)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        log.debug("the next start is taken for the first: %s", error)


def may_use_gpu(config: EngineConfig) -> bool:
    """Whether an engine will most likely launch Triton kernels on an NVIDIA GPU. Does not import torch."""
    executor = config.executor
    if executor.device.partition(":")[0] == "cpu" or executor.kernels == "plain" or find_spec("triton") is None:
        return False
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and _has_gpu()


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _gpus() -> list[str]:
    """The models of this machine's GPUs, as the driver names them, as far as its files can be read."""
    found: list[str] = []
    for file in sorted(DRIVER.glob("*/information")):
        with suppress(OSError):
            found += [line for line in file.read_text().splitlines() if line.startswith("Model:")]
    return found


def _mark(config: EngineConfig) -> Path:
    """The path of a configuration's mark. Does not import torch or triton."""
    from engine.core.executors.wire import encode

    settings = (config.model, config.attention, config.quant, config.executor, config.cache, config.speculator)
    content = b"".join(map(encode, settings)) + repr((_versions(), _newest_kernel(), _gpus())).encode()
    return _triton_cache() / MARKS / blake2b(content, digest_size=12).hexdigest()


@cache
def _versions() -> list[str]:
    """Versions of torch and Triton, as this process found them; empty for a package that is missing."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("torch", "triton"):
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("")
    return found


@cache
def _newest_kernel() -> float:
    """When a source of kernels last changed, as of the first call: this process runs no later source."""
    package = Path(engine.__file__).parent
    return max(file.stat().st_mtime for folder in KERNELS for file in (package / folder).glob("**/*.py"))


def _triton_cache() -> Path:
    """Triton's cache directory, as triton.knobs.cache.dir gives it."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
