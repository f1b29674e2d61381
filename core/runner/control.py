"""Control operations: what `Executor.call` runs on a rank, by name. A new operation is one entry of OPERATIONS."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from attrs import define

from engine.core.device import DeviceInfo
from engine.core.errors import ControlError, EngineError, ExecutorError, near_misses
from engine.core.runner.device_state import DeviceState
from engine.core.runner.layer_profile import LayerProfile, ReadLayers, StartLayers, StopLayers
from engine.core.runner.memory_history import MemoryHistory, RecordMemory, SnapshotMemory
from engine.core.runner.step_trace import StartTrace, StepTrace, StopTrace


@define
class Rank:
    """One rank, as operations see it."""

    rank: int
    ranks: int
    device: DeviceInfo
    state: DeviceState
    memory: MemoryHistory
    trace: StepTrace
    layers: LayerProfile


class Operation(NamedTuple):
    """A control operation."""

    arguments: type[msgspec.Struct]
    """The arguments it takes; unknown ones are refused."""
    run: Callable[[Rank, Any], Any]
    """Runs on the rank, while no step is in flight, and returns plain data. Raises ControlError to refuse."""


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation without arguments."""


def describe(rank: Rank, arguments: NoArguments) -> dict[str, Any]:
    """Number, process and device of the rank, and the numbers of its running sequences."""
    return {
        "rank": rank.rank,
        "ranks": rank.ranks,
        "process": os.getpid(),
        "device": rank.device.torch_name,
        "sequences": rank.state.persistent_batch.sequences(),
    }


def start_trace(rank: Rank, arguments: StartTrace) -> None:
    """Begin to record a trace. Raises ControlError while a profile by layer is in progress."""
    if rank.layers.running:
        raise ControlError("a profile by layer uses torch.profiler now, so no trace can; stop the profile first")
    rank.trace.start(arguments)


def start_layers(rank: Rank, arguments: StartLayers) -> None:
    """Begin a profile by layer. Raises ControlError while a trace is recorded."""
    if rank.trace.running:
        raise ControlError("a trace uses torch.profiler now, so no profile by layer can; stop the trace first")
    rank.layers.start(arguments)


OPERATIONS: Mapping[str, Operation] = {
    "describe": Operation(NoArguments, describe),
    "record_memory": Operation(RecordMemory, lambda rank, given: rank.memory.record(given)),
    "start_trace": Operation(StartTrace, start_trace),
    "stop_trace": Operation(StopTrace, lambda rank, given: rank.trace.stop(given)),
    "start_layers": Operation(StartLayers, start_layers),
    "stop_layers": Operation(StopLayers, lambda rank, given: msgspec.to_builtins(rank.layers.stop(given))),
    "read_layers": Operation(ReadLayers, lambda rank, given: msgspec.to_builtins(rank.layers.read(given))),
    "memory_snapshot": Operation(SnapshotMemory, lambda rank, given: rank.memory.write(given, rank.rank)),
}


class Control:
    """Runs control operations on one rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run the operation `name` and return its plain data.

        Raises ControlError, or another EngineError, if the operation is unknown, refuses or fails, and ExecutorError if
        the device fails with it.
        """
        operation = OPERATIONS.get(name)
        if operation is None:
            raise ControlError(f"there is no control operation {name!r}; {near_misses(name, OPERATIONS)}")
        try:
            given = msgspec.convert(arguments, operation.arguments)
        except msgspec.ValidationError as error:
            fields = ", ".join(field.name for field in msgspec.structs.fields(operation.arguments)) or "no arguments"
            raise ControlError(f"wrong arguments of {name}: {error}; it takes: {fields}") from error
        try:
            return operation.run(self._rank, given)
        except EngineError:
            raise
        except Exception as error:
            self._check_device(name, error)
            raise ControlError(f"{name} failed: {type(error).__name__}: {error}") from error

    def _check_device(self, name: str, cause: Exception) -> None:
        """Raise ExecutorError if the device no longer works after an operation has failed."""
        if self._rank.device.type == "cuda":
            try:
                torch.cuda.synchronize(self._rank.device.torch_name)
            except RuntimeError as error:
                raise ExecutorError(f"{name} failed on the device: {error}") from cause
