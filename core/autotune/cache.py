"""Measured choices on disk: one JSON file for each kind of device and version of PyTorch and Triton."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cattrs
import torch
import triton
from attrs import asdict, frozen

log = logging.getLogger(__name__)

Choices = Mapping[tuple[str, int], "TuningResult"]
"""By problem and class of rows."""


@frozen(kw_only=True)
class TuningResult:
    """What was found best for one multiplication in one class of rows."""

    problem: str
    """AutotunedOp.key."""
    rows: int
    version: str
    """AutotunedOp.version."""
    kernel: str
    """AutotunedOp.name."""
    seconds: float
    usual: str
    """The candidate that this one had to gain on."""
    usual_seconds: float
    """inf: it could not run."""

    def __str__(self) -> str:
        usual = "" if self.kernel == self.usual else f" ({self.usual}: {self.usual_seconds * 1e6:.1f})"
        return f"{self.problem}, {self.rows} rows: {self.kernel}, {self.seconds * 1e6:.1f} us{usual}"


class TuningCache:
    """The choices of one machine."""

    def __init__(self, directory: Path, machine: Mapping[str, str]) -> None:
        """machine: from `describe_machine`."""
        self._machine = dict(machine)
        digest = blake2b(json.dumps(self._machine, sort_keys=True).encode(), digest_size=8).hexdigest()
        name = re.sub(r"[^A-Za-z0-9]+", "-", self._machine["device"]).strip("-")
        self.path = directory / f"{name}-{digest}.json"

    def load(self) -> Choices:
        """What is there; a file that cannot be used is ignored, with a warning."""
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["machine"] != self._machine:
                raise ValueError(f"it is of {content['machine']}")
            choices = [cattrs.structure(entry, TuningResult) for entry in content["choices"]]
        except (OSError, ValueError, TypeError, KeyError, cattrs.BaseValidationError) as error:
            log.warning("the measured kernels in %s cannot be used and are measured anew: %s", self.path, error)
            return {}
        return {(choice.problem, choice.rows): choice for choice in choices}

    def store(self, choices: Choices) -> None:
        """Write all choices, in one piece: who reads meanwhile sees the old file or the new one."""
        content: Any = {"machine": self._machine, "choices": [asdict(choice) for choice in choices.values()]}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, self.path)
        except OSError as error:
            log.warning("measured kernels cannot be kept in %s, so the next start measures again: %s", self.path, error)


def default_directory() -> Path:
    """Where the cache is unless the setting executor.kernel_cache says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "engine" / "kernels"


def describe_machine(device: torch.device) -> dict[str, str]:
    """All that a measurement depends on but the kernels, whose version each choice has."""
    return {
        "device": torch.cuda.get_device_name(device),
        "pytorch": torch.__version__,
        "triton": triton.__version__,
    }
