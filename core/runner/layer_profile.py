"""Profiles the steps of one rank by layer: the time of each module, and what the module computes and moves."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from attrs import evolve, frozen

from engine.core.device import DeviceInfo
from engine.core.distributed.rank_group import RankGroup
from engine.core.errors import ControlError
from engine.core.profiling.cost import Work
from engine.core.profiling.count import count_model
from engine.core.profiling.layer_events import BREAK, STEP, TWIN, Event, ModuleTimes
from engine.core.profiling.layer_times import Attribution, attribute
from engine.core.profiling.rank_layers import LayerRow, RankLayers
from engine.core.profiling.step_shape import StepShape
from engine.core.runner.module_ranges import ModuleRanges
from engine.core.runner.step import PendingStep, StepLauncher
from engine.core.types import Step

if TYPE_CHECKING:
    from engine.core.attention.groups import CacheLayout
    from engine.core.layers import LayerFactory
    from engine.core.profiling.cost import ModelCost, ModuleCost
    from engine.core.sampling.base import SamplingPath

ROWS_PER_ANSWER = 400
"""Rows of modules that fit into the answer of a control call."""


class StartLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `start_layers`."""

    skip: int = 2
    """Steps that are recorded first but not counted."""
    steps: int = 0
    """Steps to count, after which recording ends; 0: until `stop_layers`."""


class StopLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `stop_layers`."""

    discard: bool = False
    """Whether to answer nothing, and to raise no error if nothing is recorded."""


class ReadLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `read_layers`."""

    start: int
    """Number of the first row of the answer."""


@frozen
class _Graphs:
    """The CUDA graphs of a step: those of a batch size and a sampling path, or piecewise ones of a number of tokens."""

    size: int
    path: SamplingPath | None

    @property
    def key(self) -> str:
        """The name of the graphs in annotations and errors."""
        return f"{self.size} tokens" if self.path is None else f"decode {self.size}, {self.path.name}"


@frozen
class _RecordedStep:
    """A recorded step, as far as it is known without the profiler."""

    shape: StepShape
    decodes: int
    prefill_tokens: int
    graphs: _Graphs | None


class LayerProfile:
    """Profiles the steps of one rank between `start` and `stop`."""

    def __init__(
        self,
        rank: int,
        device: DeviceInfo,
        launcher: StepLauncher,
        layers: LayerFactory,
        layout: CacheLayout,
        group: RankGroup,
    ) -> None:
        """layers: the factory that made the layers of the launcher's model."""
        self._rank = rank
        self._device = device
        self._launcher = launcher
        self._layers = layers
        self._layout = layout
        self._ranges = ModuleRanges(launcher.state, layers, layout, group)
        self._profile: Any = None
        """The profiler; None unless steps are being recorded."""
        self._recorded: Any = None
        """The profiler, from the end of the recording until `stop`; None otherwise."""
        self._cost: ModelCost | None = None
        self._skip = 0
        self._most = 0
        """Steps after which recording ends; 0: at `stop`."""
        self._steps: list[_RecordedStep] = []
        self._path: SamplingPath | None = None
        """The sampling path of the graph that was replayed last."""
        self._rows: list[LayerRow] = []

    @property
    def running(self) -> bool:
        """Whether steps are being recorded."""
        return self._profile is not None

    def start(self, arguments: StartLayers) -> None:
        """Begin to record. Raises ControlError if steps are recorded already."""
        if self._profile is not None:
            raise ControlError("a profile by layer is in progress already; stop it first")
        self._skip, self._steps, self._rows, self._recorded = arguments.skip, [], [], None
        self._most = arguments.steps and arguments.skip + arguments.steps + 1
        self._cost = count_model(self._layers, self._layout)
        if self._device.type != "cpu":
            with self._profiler():  # the first use sets up the tracing of the device, which takes long
                torch.ones(1, device=self._device.torch_name).add_(1)
                torch.cuda.synchronize(self._device.torch_name)
        profile = self._profiler()
        profile.start()
        try:
            self._ranges.add()
            self._ranges.observe(self._launcher.state.sampler, "graph_path", self._note_path)
        except BaseException:
            self._ranges.remove()
            profile.stop()
            raise
        self._profile = profile
        self._launcher.observe(self._launch)

    def stop(self, arguments: StopLayers) -> RankLayers | None:
        """End the recording; return an average step with the first rows of modules. `read` returns the other rows.

        Raises ControlError if nothing is recorded, or if kernels cannot be attributed.
        """
        self._end()
        recorded, self._recorded = self._recorded, None
        if arguments.discard:
            return None
        if recorded is None:
            raise ControlError("no profile by layer is in progress; start one first")
        try:
            events = _events(recorded)  # now: after another session of the profiler, times of the device would be 0
        finally:
            twins = self._run_twins()  # all ranks take part, whatever becomes of their events
        return self._report([*events, *twins])

    def _end(self) -> None:
        """End the recording, if it has not ended, and restore the modules."""
        if self._profile is not None:
            self._launcher.observe(None)
            self._ranges.remove()
            self._recorded, self._profile = self._profile, None
            self._recorded.stop()

    def _profiler(self) -> Any:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type != "cpu":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        profile: Any = torch.profiler.profile(activities=kinds, acc_events=True)  # else 2.11 warns of cycles
        return profile

    def read(self, arguments: ReadLayers) -> list[LayerRow]:
        """Rows of the last profile from number `start` on, at most ROWS_PER_ANSWER."""
        return self._rows[arguments.start : arguments.start + ROWS_PER_ANSWER]

    def _launch(self, step: Step, launch: Callable[[Step], PendingStep]) -> PendingStep:
        """Launch a step within an annotation, and record its shape."""
        if len(self._steps) == self._most > 0:
            self._end()
            return launch(step)
        with torch.profiler.record_function(f"{STEP}{len(self._steps)}"):
            pending = launch(step)
        graphs = None
        if pending.graph_size:
            whole = self._launcher.graph_size(step) is not None
            graphs = _Graphs(pending.graph_size, self._path if whole else None)
        self._steps.append(
            _RecordedStep(
                shape=self._shape(step),
                decodes=len(step.decodes) + len(step.drafts),
                prefill_tokens=sum(chunk.count for chunk in step.chunks),
                graphs=graphs,
            )
        )
        return pending

    def _note_path(self, path: SamplingPath) -> None:
        self._path = path

    def _shape(self, step: Step) -> StepShape:
        """The shape of a step that was just launched, after which its tokens count as computed."""
        assert self._cost is not None
        persistent_batch = self._launcher.state.persistent_batch
        ends = persistent_batch.computed[persistent_batch.rows(step.decodes)]
        shape = StepShape.of(
            decodes=[int(end) - later for later in range(step.iterations) for end in ends],
            chunks=[
                *((chunk.start, chunk.count) for chunk in step.chunks),
                *((part.start, len(part.tokens)) for part in step.drafts),
            ],
            sampled=len(step.decodes) * step.iterations
            + sum(chunk.sample for chunk in step.chunks)
            + sum(len(part.tokens) for part in step.drafts),
            windows=self._cost.windows,
        )
        return evolve(shape, iterations=step.iterations)

    def _run_twins(self) -> list[Event]:
        """Run each captured step that the recorded steps replayed kernel by kernel; return the profiler's events."""
        used = [one for one in dict.fromkeys(step.graphs for step in self._steps) if one is not None]
        if not used:
            return []
        graphs, profile = self._launcher.graphs, self._profiler()
        profile.start()
        try:
            self._ranges.add()
            for one in used:
                annotation: Any = torch.profiler.record_function(TWIN + one.key)
                if one.path is not None and graphs.decode is not None:
                    graphs.decode.run_without_graph(one.size, one.path, annotation)
                elif graphs.piecewise is not None:
                    graphs.piecewise.run_without_graphs(one.size, annotation, _mark_break)
            if self._device.type != "cpu":
                torch.cuda.synchronize(self._device.torch_name)
        finally:
            self._ranges.remove()
            profile.stop()
        return [_renumbered(event) for event in _events(profile)]

    def _report(self, events: list[Event]) -> RankLayers:
        """Attribute what was recorded to modules."""
        assert self._cost is not None
        keys = {number: step.graphs.key for number, step in enumerate(self._steps) if step.graphs is not None}
        found = attribute(events, graphs=keys, first=self._skip, device=self._device.type)
        counted = self._steps[self._skip : self._skip + found.steps]
        shapes = [step.shape for step in counted]
        self._rows = list(_rows(self._cost, shapes, found))
        total = _mean([self._cost.work(shape) for shape in shapes])
        return RankLayers(
            rank=self._rank,
            device=self._device.type,
            steps=found.steps,
            step_us=found.span / found.steps,
            idle_us=found.idle / found.steps,
            decodes=tuple(sorted({step.decodes for step in counted})),
            prefill_tokens=tuple(sorted({step.prefill_tokens for step in counted})),
            graphs=tuple(Counter("" if step.graphs is None else step.graphs.key for step in counted).items()),
            flops=total.flops,
            flops8=total.flops8,
            bytes=total.step_bytes,
            uncounted=self._cost.uncounted[:10],
            num_rows=len(self._rows),
            rows=self._rows[:ROWS_PER_ANSWER],
        )


def _rows(cost: ModelCost, shapes: list[StepShape], found: Attribution) -> list[LayerRow]:
    """A row per module: those that were called, in the order of their first calls, then the others."""
    costs: dict[str, list[ModuleCost]] = {}
    for module in cost.modules:
        costs.setdefault(module.name, []).append(module)
    steps, none = found.steps, ModuleTimes()
    rows = []
    for name in dict.fromkeys((*found.modules, *costs)):
        times, modules = found.modules.get(name, none), costs.get(name, [])
        work = _mean([sum((module.work(shape) for module in modules), Work()) for shape in shapes])
        rows.append(
            LayerRow(
                name=name,
                kind=modules[0].kind if modules else "",
                calls=times.calls / steps,
                kernels=times.kernels / steps,
                cpu_us=times.cpu / steps,
                device_us=times.device / steps,
                collective_us=times.collective / steps,
                flops=work.flops,
                flops8=work.flops8,
                bytes=work.bytes,
            )
        )
    return rows


def _mean(works: list[Work]) -> Work:
    """The work of an average step."""
    total, steps = sum(works, Work()), len(works)
    return Work(
        flops=total.flops / steps,
        flops8=total.flops8 / steps,
        weight_bytes=total.weight_bytes / steps,
        kv_read=total.kv_read / steps,
        kv_written=total.kv_written / steps,
        activation_bytes=total.activation_bytes / steps,
    )


def _mark_break() -> None:
    with torch.profiler.record_function(BREAK):
        pass


def _renumbered(event: Event) -> Event:
    """An event of the twins' session, with a correlation id that differs from all of the steps' session."""
    correlation = event.get("args", {}).get("correlation")
    return event if correlation is None else {**event, "args": {"correlation": -1 - correlation}}


def _events(profile: Any) -> list[Event]:
    """The events of a profile that has stopped."""
    with tempfile.TemporaryDirectory(prefix="engine-layers-") as directory:
        file = Path(directory) / "trace.json"
        try:
            profile.export_chrome_trace(str(file))
            events: list[Event] = json.loads(file.read_bytes())["traceEvents"]
        except (OSError, RuntimeError, ValueError) as error:
            raise ControlError(f"the events of the profiler cannot be read: {error}") from error
    return events
