"""The step loop: plans a step, submits it to the executor, and commits the result of the oldest step in flight."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, NoReturn

import attrs

from engine.core.errors import EngineError, ExecutorError, StepFaultError
from engine.core.executors.base import Executor, PendingResult
from engine.core.graph_uses import GraphUses
from engine.core.phase_timer import PhaseTimer
from engine.core.plugin_host.faults import PluginCall, name_fault, shown
from engine.core.profiling.live import StepMeter
from engine.core.schedulers.scheduler import Scheduler
from engine.core.speculators.step_timing import StepTiming
from engine.core.types import EngineStats, HistogramCounts, Output, Step, StepResult

if TYPE_CHECKING:
    from engine.core.grammars.compiler import Grammars
    from engine.core.speculators.draft_lengths import DraftLengths
    from engine.core.timeline.recorder import Recorder

STEP_PHASES = ("schedule", "submit", "wait", "commit")
"""Phases of a step that the engine times; the runner adds its own (StepResult.seconds)."""


class StepLoop:
    """Runs the steps of one scheduler on one executor.

    steps_ahead: steps in flight while the next is planned: 1 to overlap planning with the device's work, else 0.
    owner: name of the executor in errors. grammars: compiles the grammars of requests. meter: counts the FLOPs
    and bytes of steps; None: not counted. draft_lengths: corrected by measured times; None: there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        steps_ahead: int,
        owner: str,
        grammars: Grammars,
        meter: StepMeter | None,
        draft_lengths: DraftLengths | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._steps_ahead = steps_ahead
        self._submission = PluginCall(owner, "a step")
        self._grammars = grammars
        self._meter = meter
        self._in_flight: deque[tuple[Step, PendingResult]] = deque()
        self._outputs: list[Output] = []
        """Outputs that are committed but not returned yet."""
        self._speculates = scheduler.speculates
        self._timing = None if draft_lengths is None else StepTiming(draft_lengths, overlaps=steps_ahead > 0)
        self._kernels_compiled = self._graphs_captured = 0
        self._graph_uses = GraphUses()
        self._worker_pauses: tuple[tuple[str, tuple[HistogramCounts, ...]], ...] = ()
        self.timers = defaultdict(PhaseTimer, {phase: PhaseTimer() for phase in STEP_PHASES})
        """By phase: the phases of STEP_PHASES and those of the runner."""
        self.recorder: Recorder | None = None
        """Records each submitted step; None: no trace is recorded."""
        self.failure = ""
        """Why no step can run any more; empty while steps can."""

    @property
    def has_steps(self) -> bool:
        """Whether a step is in flight, or committed outputs are not returned yet."""
        return bool(self._in_flight or self._outputs)

    def step(self) -> list[Output]:
        """Plan and submit a step, then commit the oldest step in flight unless it may stay in flight.

        While requests have drafts (`Scheduler.needs_result`), the step in flight is committed before the next is
        planned. Returns the new tokens of each request. Raises ExecutorError when a step failed; `failure` is then set.
        """
        if self._speculates and self._in_flight:
            with self.timers["schedule"]:
                needs_result = self.scheduler.needs_result()
            if needs_result:
                self._commit_oldest()
        with self.timers["schedule"]:
            step = self.scheduler.schedule(time.monotonic())
            if step is not None and (grammars := self._grammars.take_begun()):
                step = attrs.evolve(step, grammars=grammars)
        if step is not None:
            self._submit(step)
        if self._in_flight and (step is None or len(self._in_flight) > self._steps_ahead):
            self._commit_oldest()
        if self._timing is not None:
            self._timing.learn()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _submit(self, step: Step) -> None:
        """Submit a step to the executor."""
        try:
            if self._timing is not None:
                self._timing.begin()
            with self.timers["submit"]:
                pending = self._executor.submit(step)
            if self.recorder is not None:
                pending = self.recorder.submitted(step, pending)
            self._in_flight.append((step, pending))
        except BaseException as error:
            self._fail(error)

    def _commit_oldest(self) -> None:
        """Wait for the oldest step in flight and commit its result."""
        step, pending = self._in_flight.popleft()
        try:
            with self.timers["wait"]:
                result = pending.result()
            if self._timing is not None:
                self._timing.end(step)
            if self._meter is not None:
                self._meter.finish()
        except BaseException as error:
            self._fail(error)
        try:
            self._count(step, result)
            with self.timers["commit"]:
                self._outputs += self.scheduler.commit(step, result, time.monotonic())
        except BaseException as error:
            self._fail_commit(result, error)

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise an executor's error, naming the plugin at fault; no further step can run."""
        try:
            name_fault(error, self._submission)
            raise error
        except BaseException as named:
            self._note_failure(named)
            raise

    def _fail_commit(self, result: object, error: BaseException) -> NoReturn:
        """Raise the error of a commit, naming the executor if its result is wrong; no further step can run."""
        wrong = ""
        if not isinstance(result, StepResult):
            wrong = f"{shown(result)}, not a StepResult"
        elif isinstance(error, ExecutorError):
            wrong = str(error)
        if wrong:
            error = StepFaultError(f"{self._submission.owner} returned a wrong result from result(): {wrong}")
        self._note_failure(error)
        raise error

    def _note_failure(self, error: BaseException) -> None:
        """Set `failure`: the tokens of the step are lost, so no further step can run."""
        message = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        self.failure = message or type(error).__name__

    def _count(self, step: Step, result: StepResult) -> None:
        """Add a result's times and counts to the totals."""
        for phase, seconds in result.seconds:
            self.timers[phase].seconds += seconds
        self._kernels_compiled += result.kernels_compiled
        self._graphs_captured += result.graphs_captured
        if result.graph_size is not None:
            self._graph_uses.count(step, result.graph_size)
        if result.gc_pauses:
            self._worker_pauses = (("worker", result.gc_pauses),)

    def forget(self) -> None:
        """Drop the steps in flight without committing them."""
        self._in_flight.clear()
        if self._timing is not None:
            self._timing.forget()
        self._outputs.clear()

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """Add the counters of the loop to those of the scheduler."""
        return attrs.evolve(
            stats,
            seconds=tuple((phase, timer.seconds) for phase, timer in self.timers.items()),
            work=self._meter.totals() if self._meter is not None else (),
            peaks=self._meter.peaks if self._meter is not None else None,
            kernels_compiled=self._kernels_compiled,
            graphs_captured=self._graphs_captured,
            graph_replays=self._graph_uses.replays(),
            graph_misses=self._graph_uses.misses,
            gc_pauses=self._worker_pauses,
        )
