"""Records the allocations of GPU memory, and writes snapshots for torch's memory viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.core.device import DeviceInfo
from engine.core.errors import ControlError

VIEWER = "https://pytorch.org/memory_viz"


class RecordMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `record_memory`."""

    max_entries: int = 100_000
    """Allocations and frees remembered, the latest ones; 0: stop recording and forget them."""
    stacks: bool = True
    """Whether to remember the Python stack of each, which takes about 2 us per event."""


class SnapshotMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `memory_snapshot`."""

    directory: str
    """Where to write memory-rankN.pickle, on the rank's machine; created if missing."""


class MemoryHistory:
    """The allocation history of one rank's GPU."""

    def __init__(self, device: DeviceInfo) -> None:
        self._device = device
        self._recording = False

    def record(self, arguments: RecordMemory) -> None:
        """Begin to record, with an empty history, or stop."""
        self._require_gpu()
        if arguments.max_entries < 0:
            raise ControlError(f"max_entries is {arguments.max_entries}; give a number of events, or 0 to stop")
        self._recording = arguments.max_entries > 0
        _memory()._record_memory_history(
            enabled="all" if self._recording else None,
            context="all" if arguments.stacks else None,
            stacks="python",
            max_entries=max(1, arguments.max_entries),
            device=self._device.torch_name,
            clear_history=True,
        )

    def write(self, arguments: SnapshotMemory, rank: int) -> str:
        """Write the memory in use, and the history if it is recorded; return the file's path.

        Open the file in torch's viewer (VIEWER), which runs in the browser.
        """
        self._require_gpu()
        file = Path(arguments.directory) / f"memory-rank{rank}.pickle"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _memory()._dump_snapshot(str(file))
        except OSError as error:
            raise ControlError(f"the memory snapshot cannot be written to {file}: {error.strerror}") from error
        return str(file)

    def _require_gpu(self) -> None:
        if self._device.type != "cuda":
            raise ControlError(
                f"there is no allocation history of {self._device.torch_name}: torch keeps one of GPU memory only; "
                "for the host's memory use a Python memory profiler"
            )


def _memory() -> Any:
    """torch.cuda.memory, whose functions for snapshots have no types."""
    return torch.cuda.memory
