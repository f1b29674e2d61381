"""Records the steps of one rank: slices of our own, torch.profiler's operators and kernels, and NVTX ranges."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.core.device import DeviceInfo
from engine.core.errors import ControlError
from engine.core.runner.step import PendingStep, StepLauncher
from engine.core.timeline.names import step_args, step_name
from engine.core.timeline.spans import Spans, write_part
from engine.core.types import Step

FIRST = 200
"""Position of rank 0 among the processes of a trace."""


class StartTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `start_trace`."""

    directory: str
    """Where `stop_trace` leaves its files."""
    activities: tuple[str, ...] = ("cpu", "cuda")
    nvtx: bool = False


class StopTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `stop_trace`."""

    discard: bool = False
    """Whether to write nothing, and to raise no error if nothing is recorded."""


class StepTrace:
    """Records the steps of one rank between `start` and `stop`."""

    def __init__(self, rank: int, device: DeviceInfo, launcher: StepLauncher) -> None:
        self._name = f"rank{rank}"
        self._process = f"rank {rank}"
        self._order = FIRST + rank
        self._device = device
        self._launcher = launcher
        self._spans: Spans | None = None
        self._directory = Path()
        self._profile: Any = None
        self._nvtx = False

    @property
    def running(self) -> bool:
        """Whether steps are being recorded."""
        return self._spans is not None

    def start(self, arguments: StartTrace) -> None:
        """Begin to record. Raises ControlError if steps are recorded already, or if the directory does not exist."""
        if self._spans is not None:
            raise ControlError("steps are being recorded already; stop the recording first")
        self._directory = Path(arguments.directory)
        if not self._directory.is_dir():
            raise ControlError(
                f"this rank does not see the directory {self._directory}; give one on a file system that ranks share"
            )
        self._nvtx = arguments.nvtx
        self._profile = self._start_profiler(arguments.activities)
        self._spans = Spans()
        self._launcher.observe(self._launch)

    def stop(self, arguments: StopTrace) -> None:
        """End the recording and write it. Raises ControlError if there is none, or if it cannot be written."""
        if self._spans is not None:
            self._launcher.observe(None)
        spans, self._spans = self._spans, None
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
        if arguments.discard:
            return
        if spans is None:
            raise ControlError("no steps are being recorded; start a recording first")
        kineto = ""
        try:
            if profile is not None:
                kineto = f"{self._name}.kineto.json"
                profile.export_chrome_trace(str(self._directory / kineto))
            write_part(self._directory, self._name, spans.part(self._process, self._order, kineto=kineto))
        except (OSError, RuntimeError) as error:
            raise ControlError(f"the trace cannot be written to {self._directory}: {error}") from error

    def _start_profiler(self, activities: tuple[str, ...]) -> Any:
        """Start torch.profiler; None if it has nothing to record."""
        kinds = torch.profiler.ProfilerActivity
        wanted = [kinds.CPU] if "cpu" in activities else []
        if "cuda" in activities and self._device.type == "cuda":
            wanted.append(kinds.CUDA)
        if not wanted:
            return None
        profile: Any = torch.profiler.profile(activities=wanted, acc_events=True)  # else 2.11 warns of cycles
        profile.start()
        return profile

    def _launch(self, step: Step, launch: Callable[[Step], PendingStep]) -> PendingStep:
        """Launch a step as a slice."""
        assert self._spans is not None
        name = step_name(step)
        size = self._launcher.graph_size(step)
        if size is not None:
            name += f", graph replay {size}"
        nvtx: Any = torch.cuda.nvtx
        annotation = torch.profiler.record_function(name) if self._profile is not None else nullcontext()
        if self._nvtx:
            nvtx.range_push(name)
        begin = time.monotonic_ns()
        try:
            with annotation:
                return launch(step)
        finally:
            self._spans.add("steps", name, begin, time.monotonic_ns(), step_args(step))
            if self._nvtx:
                nvtx.range_pop()
