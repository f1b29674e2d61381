"""Records an engine and its ranks for some steps: their phases, steps and requests, and what torch.profiler sees."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import field, frozen

from engine.core.errors import ControlError
from engine.core.timeline.merge import Job, Report, start_merge
from engine.core.timeline.names import step_args, step_name
from engine.core.timeline.spans import Spans, SpanTimer, Stages, write_part

if TYPE_CHECKING:
    import subprocess

    from engine.core.executors.base import PendingResult
    from engine.core.phase_timer import PhaseTimer
    from engine.core.schedulers.request_state import RequestState
    from engine.core.schedulers.scheduler import Scheduler
    from engine.core.types import Step, StepResult

SUFFIX = ".trace.json.gz"
ACTIVITIES = ("cpu", "cuda")
PHASES = "phases"
"""Row of an engine's phases."""


@frozen(kw_only=True)
class TraceOptions:
    """What to record, and where to write it."""

    path: str
    """File of the trace, ending in .trace.json.gz or .json.gz. Its directory must be one that all ranks see."""
    steps: int = 0
    """Steps to record; 0: until `Engine.stop_trace`."""
    after: int = 0
    """Steps to wait before the first one recorded."""
    activities: tuple[str, ...] = ACTIVITIES
    """What torch.profiler records in the ranks: cpu (operators), cuda (kernels); empty: torch.profiler stays off."""
    nvtx: bool = False
    """Whether to mark steps and phases with NVTX ranges too, for Nsight."""
    max_steps: int = 200
    """Steps after which recording ends in any case."""
    max_seconds: float = 60.0
    """Seconds after which recording ends in any case."""
    others: tuple[str, ...] = field(default=(), repr=False)
    """Names of the parts that other processes, such as front ends, write."""

    def refusal(self, device: str) -> str | None:
        """Why this cannot be recorded on a device of this type, in a sentence; None if it can."""
        if self.steps < 0 or self.after < 0:
            return f"steps ({self.steps}) and after ({self.after}) are numbers of steps, from 0 on"
        if self.steps > self.max_steps:
            return f"steps is {self.steps}, but at most {self.max_steps} are recorded; ask for fewer"
        if unknown := set(self.activities) - set(ACTIVITIES):
            return f"activities has {', '.join(sorted(unknown))}; it may have {' and '.join(ACTIVITIES)}"
        if self.nvtx and device != "cuda":
            return f"NVTX ranges need a GPU, and this engine runs on {device}; leave out nvtx"
        return None


class Recorder:
    """One recording, from its start to the trace. Used by Engine, in the engine's thread."""

    def __init__(
        self,
        options: TraceOptions,
        *,
        call: Callable[[str, Mapping[str, Any]], list[Any]],
        timers: MutableMapping[str, PhaseTimer],
        phases: Sequence[str],
        scheduler: Scheduler,
        ended: Callable[[], None],
        notify: Callable[[str], None],
    ) -> None:
        """call: runs a control operation on all ranks. timers: of the engine's phases, replaced while recording.

        ended: called when steps need not be reported any more. notify: called with the directory of the parts when
        recording begins, and with an empty text when the others are to write their parts.
        Raises ControlError if the directory cannot be written.
        """
        self.options = options
        self._call = call
        self._timers = timers
        self._phases = phases
        self._scheduler = scheduler
        self._ended = ended
        self._notify = notify
        self._skip = options.after
        self._steps = 0
        self._spans: Spans | None = None
        """While recording."""
        self._deadline = time.monotonic() + options.max_seconds
        """When the recording must end or, before it begins, when the steps to skip must be over."""
        self._stages: list[Stages] = []
        self._in_flight: list[_RecordedResult] = []
        self._requests: dict[str, tuple[RequestState, int | None]] = {}
        """State and end of each request seen."""
        self._ranks = 0
        self._merging: subprocess.Popen[bytes] | None = None
        self._report: Report | None = None
        self._failure = ""
        target = Path(options.path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._directory = tempfile.mkdtemp(prefix=".parts-", dir=target.parent)
        except OSError as error:
            raise ControlError(f"a trace cannot be written to {target.parent}: {error.strerror}") from error

    @property
    def running(self) -> bool:
        """Whether the trace is neither written nor given up."""
        return self._report is None and not self._failure

    def begin_if_due(self) -> None:
        """Begin to record unless steps are to be skipped first. Raises ControlError if a rank cannot."""
        if self._skip == 0:
            self._begin()

    def submitted(self, step: Step, pending: PendingResult) -> PendingResult:
        """Note a step that was just submitted; returns the pending result to use for it."""
        if self._spans is None:
            self._skip -= 1
            with suppress(ControlError):  # reported by `report`
                self.begin_if_due()
            return pending
        timer = self._timers["submit"]
        assert isinstance(timer, SpanTimer)
        self._note_requests([new.sequence for new in step.new])
        self._steps += 1
        recorded = _RecordedResult(step, pending, timer.begin, self._stages)
        self._in_flight = [*(one for one in self._in_flight if not one.fetched), recorded]
        if self._steps == (self.options.steps or self.options.max_steps) or time.monotonic() > self._deadline:
            with suppress(ControlError):  # reported by `report`
                self.stop()
        return recorded

    def stop(self) -> None:
        """End the recording and start to write the trace; a no-op once it has ended.

        Waits for the steps in flight. Raises ControlError if the trace cannot be written.
        """
        if self._spans is None:
            if self._merging is None and self.running:
                self._fail("nothing was recorded: the profile was stopped before its first step")
            return
        for recorded in self._in_flight:
            recorded.result()
        spans, self._spans = self._spans, None
        self._restore()
        try:
            self._call("stop_trace", {})
            self._note_finished()
            now = time.monotonic_ns()
            stages = [*self._stages, *self._request_stages(spans, now)]
            write_part(self._directory, "engine", spans.part("engine", 100, stages=stages))
        except ControlError as error:
            self._fail(str(error))
            raise
        except OSError as error:
            self._fail(f"the trace cannot be written: {error.strerror}")
            raise ControlError(self._failure) from error
        self._notify("")
        cut = []
        if self._steps < self.options.steps:
            cut.append(f"{self._steps} of {self.options.steps} steps were recorded")
        if not self.options.steps and self._steps == self.options.max_steps:
            cut.append(f"recording ended after {self._steps} steps, the most that are recorded")
        if time.monotonic() > self._deadline:
            cut.append(f"recording ended after {self.options.max_seconds:g} s, the longest time")
        ranks = tuple(f"rank{rank}" for rank in range(self._ranks))
        job = Job(
            parts=self._directory,
            target=str(Path(self.options.path).absolute()),
            expected=(*self.options.others, "engine", *ranks),
            cut=tuple(cut),
        )
        self._merging = start_merge(job)

    def check_time(self) -> None:
        """End a trace that has lasted too long; for an engine without steps."""
        if time.monotonic() <= self._deadline:
            return
        if self._spans is not None:
            self.stop()
        elif self._merging is None and self.running:
            skipped, limit = self.options.after - self._skip, self.options.max_seconds
            self._fail(
                f"nothing was recorded: in the {limit:g} s that it may last, the engine ran only {skipped} of the"
                f" {self.options.after} steps to skip; send requests meanwhile, or skip fewer steps"
            )

    def report(self, *, wait: bool = False) -> Report | None:
        """The report once the trace is written, None before; wait: until then. Raises ControlError if it failed."""
        if self._merging is not None and (wait or self._merging.poll() is not None):
            output, _ = self._merging.communicate()
            code, self._merging = self._merging.returncode, None
            if code:
                self._fail(output.decode() or f"the process that merges the trace exited with code {code}")
            else:
                self._report = msgspec.structs.replace(msgspec.json.decode(output, type=Report), steps=self._steps)
        if self._failure:
            raise ControlError(self._failure)
        return self._report

    def close(self) -> None:
        """Give up what is not written yet; for an engine that closes."""
        if self._merging is not None:
            self._merging.kill()
            self._merging.communicate()
            self._merging = None
        if self.running:
            if self._spans is not None:
                self._spans = None
                self._restore()
            self._fail("the engine was closed before the trace was written")

    def _begin(self) -> None:
        options = self.options
        try:
            arguments = {"directory": self._directory, "activities": list(options.activities), "nvtx": options.nvtx}
            self._ranks = len(self._call("start_trace", arguments))
        except ControlError as error:
            with suppress(ControlError):
                self._call("stop_trace", {"discard": True})
            self._fail(str(error))
            raise
        self._spans = Spans()
        self._deadline = time.monotonic() + options.max_seconds
        nvtx = options.nvtx
        for phase in self._phases:
            after = self._note_finished if phase == "commit" else None
            self._timers[phase] = SpanTimer(
                self._spans, PHASES, phase, self._timers[phase].seconds, after=after, nvtx=nvtx
            )
        self._note_requests(None)
        self._notify(self._directory)

    def _restore(self) -> None:
        """Put back timers that only count, and have no more steps reported."""
        for phase in self._phases:
            timer = self._timers[phase]
            if isinstance(timer, SpanTimer):
                self._timers[phase] = timer.plain()
        self._ended()

    def _fail(self, message: str) -> None:
        self._failure = message
        self._notify("")
        self._ended()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _note_requests(self, sequences: Sequence[int] | None) -> None:
        """Note the requests of these running sequences; None: all requests."""
        for state in self._scheduler.request_states(sequences):
            self._requests.setdefault(state.id, (state, None))

    def _note_finished(self) -> None:
        """Note the end of requests that have finished."""
        now = time.monotonic_ns()
        for name, (state, end) in self._requests.items():
            if end is None and state.finished:
                self._requests[name] = state, now

    def _request_stages(self, spans: Spans, now: int) -> list[Stages]:
        """The requests with their stages, cut at the begin and at the end of the recording."""
        self._note_requests(None)
        begin, found = spans.clocks[0].monotonic, []
        for name, (state, end) in self._requests.items():
            arrival = _ns(state.request.arrival)
            until = now if end is None else end
            times = [arrival, _ns(state.scheduled_at), _ns(state.first_token_at), until]
            cut = [min(max(begin, until if at is None else at), until) for at in times]
            stages = [
                (stage, cut[index], cut[index + 1])
                for index, stage in enumerate(("queue", "prefill", "decode"))
                if cut[index] < cut[index + 1]
            ]
            args = {
                "prompt_tokens": state.prompt_len,
                "output_tokens": len(state.output),
                "cached_tokens": state.cached_tokens,
                "finished": end is not None,
                "arrived_before_us": max(0, begin - (arrival or begin)) / 1000,
            }
            found.append(Stages("request", name, f"request {name}", cut[0], until, tuple(stages), args))
        return found


class _RecordedResult:
    """A PendingResult that notes when its step's result was fetched, and keeps it."""

    def __init__(self, step: Step, pending: PendingResult, begin: int, stages: list[Stages]) -> None:
        self._step = step
        self._pending = pending
        self._begin = begin
        self._stages = stages
        self._result: StepResult | None = None

    @property
    def fetched(self) -> bool:
        """Whether the result was fetched."""
        return self._result is not None

    def done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._result is not None or self._pending.done()

    def result(self) -> StepResult:
        """Wait for the step. Raises ExecutorError."""
        if self._result is None:
            self._result = self._pending.result()
            step, now = self._step, time.monotonic_ns()
            self._stages.append(Stages("step", str(step.id), step_name(step), self._begin, now, (), step_args(step)))
        return self._result


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
