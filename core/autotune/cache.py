"""Tuning results on disk: one JSON file per device type, PyTorch version and Triton version."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cattrs
import torch
import triton
from attrs import asdict

from engine.core.atomic_write import write_text
from engine.core.autotune.results import TuningResult, TuningResults, device_name
from engine.core.autotune.shipped import load_shipped

log = logging.getLogger(__name__)

FORMAT = 2
"""Version of the file's format, a part of the file's name."""


class TuningCache:
    """The tuning results of one machine."""

    def __init__(self, directory: Path, machine: Mapping[str, str]) -> None:
        """machine: from `describe_machine`."""
        self._machine = dict(machine)
        digest = blake2b(json.dumps(self._machine, sort_keys=True).encode(), digest_size=8).hexdigest()
        self.path = directory / f"{device_name(self._machine)}-{digest}-v{FORMAT}.json"

    def load(self) -> TuningResults:
        """Read the file. One that cannot be used is ignored, with a warning."""
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["machine"] != self._machine:
                raise ValueError(f"it is of {content['machine']}")
            results = [cattrs.structure(entry, TuningResult) for entry in content["results"]]
        except (OSError, ValueError, TypeError, KeyError, cattrs.BaseValidationError) as error:
            log.warning("the tuning results in %s cannot be used, and are measured again: %s", self.path, error)
            return {}
        return {(result.op, result.rows): result for result in results}

    def shipped(self) -> TuningResults:
        """The results for this machine that come with the package."""
        return load_shipped(self._machine)

    def store(self, results: TuningResults) -> None:
        """Replace the file atomically: a concurrent reader sees the old content or the new one."""
        content: Any = {"machine": self._machine, "results": [asdict(result) for result in results.values()]}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(content, indent=1))
        except OSError as error:
            log.warning("tuning results cannot be stored in %s, so the next start measures again: %s", self.path, error)


def default_directory() -> Path:
    """Where the cache is unless the setting executor.kernel_cache says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "engine" / "kernels"


def describe_machine(device: torch.device) -> dict[str, str]:
    """The GPU, PyTorch and Triton that measurements depend on. (Each result records the version of its kernels.)"""
    return {
        "device": torch.cuda.get_device_name(device),
        "pytorch": torch.__version__,
        "triton": triton.__version__,
    }
