"""The traces of one engine: one is recorded at a time, and the latest can be stopped and reported on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.core.errors import ControlBusyError, ControlError
from engine.core.step_loop import STEP_PHASES

if TYPE_CHECKING:
    from engine.core.step_loop import StepLoop
    from engine.core.timeline.merge import Report
    from engine.core.timeline.recorder import Recorder, TraceOptions


class Traces:
    """Starts recorders of the step loop's steps. device: the type of the ranks' devices."""

    def __init__(self, loop: StepLoop, device: str) -> None:
        self._loop = loop
        self._device = device
        self._latest: Recorder | None = None

    def start(
        self,
        options: TraceOptions,
        call: Callable[[str, Mapping[str, Any]], list[Any]],
        notify: Callable[[str], None],
    ) -> None:
        """Start a trace. call: runs a control operation on all ranks. notify: as `Engine.start_trace` has it.

        Raises ControlError if the options or a rank refuse, and ControlBusyError while another trace is in progress.
        """
        if self._latest is not None and self._latest.running:
            self.report()
            if self._latest.running:
                raise ControlBusyError("a profile is in progress; stop it first, or wait for its end")
        refusal = options.refusal(self._device)
        if refusal is not None:
            raise ControlError(refusal)

        from engine.core.timeline.recorder import Recorder  # of the few engines that record a trace

        def ended() -> None:
            self._loop.recorder = None

        self._latest = self._loop.recorder = Recorder(
            options,
            call=call,
            timers=self._loop.timers,
            phases=STEP_PHASES,
            scheduler=self._loop.scheduler,
            ended=ended,
            notify=notify,
        )
        self._latest.begin_if_due()

    def stop(self) -> None:
        """End the recording and write the trace. Raises ControlError if there is none or writing fails."""
        self._started().stop()

    def report(self, *, wait: bool = False) -> Report | None:
        """The report on the latest trace; None: the trace is not written yet.

        wait: wait until the trace is written, if its recording has ended.
        Raises ControlError if no trace was started, or if writing it failed.
        """
        recorder = self._started()
        recorder.check_time()
        return recorder.report(wait=wait)

    def close(self) -> None:
        """Give up a trace that is not written yet."""
        if self._latest is not None:
            self._latest.close()

    def _started(self) -> Recorder:
        """The recorder of the latest trace."""
        if self._latest is None:
            raise ControlError("no profile was started; start one first")
        return self._latest
