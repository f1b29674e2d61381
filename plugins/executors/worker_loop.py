"""The worker loop, common to all executors of several processes: makes the runner, runs steps, reports progress."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import evolve

from engine.core.collector import finish_start, paused
from engine.core.compilation import begin_compiler_key, begin_driver, begin_first_start
from engine.core.executors import CALL_BYTE, Answer, MessageDecoder, PendingResult, answer_call, decode_call
from engine.core.gc_pauses import GcPauses
from engine.core.shm import RingClosedError, RingTimeoutError
from engine.core.startup import Phases, Progress
from engine.core.types import CacheInfo, Step, StepResult
from engine.core.wait_policy import set_wait_policy
from engine.plugins.executors.control_messages import ERRORS, Assignment, Failed, Progressed, Ready
from engine.plugins.executors.heartbeat import WorkerHeartbeat
from engine.plugins.executors.result_sender import ResultSender

if TYPE_CHECKING:
    from engine.core.runner import Runner

HEARTBEAT_SECONDS = 0.5
"""Maximum time between two heartbeats of an idle worker."""
PROGRESS_SECONDS = 0.05
"""Minimum time between two progress reports of one phase."""
MAX_ERROR_CHARS = 10_000
"""Maximum length of an error's message and of its traceback."""
HINTS = {
    "OutOfMemoryError": "use a lower --max-batch-tokens, --max-running or --memory-fraction, and look who else uses "
    "the device",
    "MemoryError": "use a lower --kv-memory or --memory-fraction, and look who else uses the machine",
    "ModuleNotFoundError": "install what is missing in the Python environment that the engine runs in",
}
"""Error class -> what may help."""


class StepRunner(Protocol):
    """The part of core.runner.Runner that a worker uses."""

    def start(self, phases: Phases) -> CacheInfo:
        """Load the model and allocate the KV cache."""

    def launch(self, step: Step) -> PendingResult:
        """Begin a step."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run a control operation."""


class ExecutorLink(Protocol):
    """A worker's connection to its executor. `report` and `send_result` may be called from different threads."""

    def receive(self, timeout: float) -> bytes:
        """Receive the next step or control call, encoded.

        Raises RingTimeoutError after `timeout` seconds, RingClosedError after the last step or call.
        """

    def send_result(self, result: StepResult) -> None:
        """Send a step's result. Called on every rank, although only the result of rank 0 is used."""

    def send_answer(self, answer: Answer) -> None:
        """Send the answer to a control call; the results of all earlier steps have been sent."""

    def report(self, message: Progressed | Ready) -> None:
        """Report progress of the start."""

    def fail(self, failed: Failed) -> None:
        """Report that the worker cannot start or cannot continue."""


class WorkerLoop:
    """Runs one worker from its start to its last step."""

    def __init__(self, assignment: Assignment, heartbeat: WorkerHeartbeat, link: ExecutorLink) -> None:
        self.phase = "start"
        """What the worker is doing, for error messages."""
        self._rendezvous = assignment.rendezvous
        self._freeze = assignment.config.server.gc_freeze
        self._gc_pauses = GcPauses()
        self._sent_collections = 0
        self._heartbeat = heartbeat
        self._link = link
        self._reported_at = 0.0
        self._decoder: MessageDecoder[Step] = MessageDecoder(Step)
        self._runner: StepRunner

    def run(self, make: Callable[[Phases], StepRunner]) -> None:
        """Start the runner that `make` returns and run steps until the last one. Errors are reported, not raised."""
        try:
            self.start(make)
            self.run_steps()
        except BaseException as error:
            self._fail(self.phase, error)
        finally:
            self._gc_pauses.close()

    def start(self, make: Callable[[Phases], StepRunner]) -> None:
        """Make and start the runner, and report that the worker is ready."""
        phases = Phases(self._report_progress)
        self._runner = make(phases)
        cache = self._runner.start(phases)
        finish_start(freeze=self._freeze)
        self._gc_pauses.listen()
        self._heartbeat.beat()
        self._link.report(Ready(cache))
        self.phase = "its loop"

    def run_steps(self) -> None:
        """Run steps until the executor ends them.

        This thread begins each step as soon as it arrives; the thread of ResultSender sends each result as soon as it
        is there. Both sleep while they have nothing to do.
        """
        results = ResultSender(self._send_result, self._fail)
        while True:
            self._heartbeat.beat()
            try:
                message = self._link.receive(HEARTBEAT_SECONDS)
            except RingTimeoutError:
                continue
            except RingClosedError:
                results.finish()
                return
            if message[0] == CALL_BYTE:
                results.wait_until_idle()
                self._answer(message)
                continue
            step = self._decoder.decode(message)
            results.wait_for_room()
            self.phase = f"step {step.id}"
            self._heartbeat.begin_step(step.id)
            results.add(step.id, self._runner.launch(step))

    def _answer(self, message: bytes) -> None:
        """Run a control call and send the answer. Raises ExecutorError if the device has failed."""
        call = decode_call(message)
        self.phase = f"the control call {call.name}"
        self._heartbeat.begin_call()
        self._link.send_answer(answer_call(self._runner, call))
        self._heartbeat.finish_call()
        self.phase = "its loop"

    def _send_result(self, step: int, pending: PendingResult) -> None:
        """Wait for a step and send its result. Every rank waits, so that every rank reports errors of its device."""
        self._heartbeat.begin_wait()
        result = pending.result()
        if self._gc_pauses.collections != self._sent_collections:
            self._sent_collections = self._gc_pauses.collections
            result = evolve(result, gc_pauses=self._gc_pauses.counts())
        self._link.send_result(result)
        self._heartbeat.finish_step()

    def _fail(self, phase: str, error: BaseException) -> None:
        """Report the error that ends this worker, raised in either thread."""
        names = [cls.__name__ for cls in type(error).__mro__]
        self._link.fail(
            Failed(
                phase=phase,
                kind=names[0],
                known=next((cls.__name__ for cls in type(error).__mro__ if cls in ERRORS), ""),
                message=str(error)[:MAX_ERROR_CHARS],
                hint=next((HINTS[name] for name in names if name in HINTS), ""),
                traceback="".join(traceback.format_exception(error))[-MAX_ERROR_CHARS:],
            )
        )

    def _report_progress(self, progress: Progress) -> None:
        """Report a phase; reports of one phase are limited, because each is a message."""
        now = time.monotonic()
        ended = progress.total and progress.done == progress.total
        if progress.phase == self.phase and not ended and now - self._reported_at < PROGRESS_SECONDS:
            return
        self.phase, self._reported_at = progress.phase, now
        rank = self._rendezvous.rank if self._rendezvous.ranks > 1 else None
        self._link.report(Progressed(evolve(progress, rank=rank)))


def make_runner(assignment: Assignment, phases: Phases) -> Runner:
    """Make the runner of one rank, with the plugins that the executor's process has chosen."""
    with phases.phase("import"), paused(freeze=assignment.config.server.gc_freeze):
        set_wait_policy(assignment.config.executor)
        begin_driver(assignment.config)
        if assignment.rendezvous.rank == 0:
            begin_first_start(assignment.config)
        from engine.core.runner import Runner  # noqa: F401  (most of the import time, counted where it happens)

        begin_compiler_key(assignment.config)
    from engine.core.device import find_device
    from engine.core.distributed import join
    from engine.core.executors import Deployment
    from engine.core.hooks import lazy
    from engine.core.plugin_host import load_plugins, resolve
    from engine.core.weights import Checkpoint

    config = assignment.config
    with phases.phase("device"):
        device = find_device(assignment.device)
    with phases.phase("plugins"):
        plugins = load_plugins(config.plugins)
        plugins.verify(assignment.manifest)
        checkpoint = Checkpoint.open(config.model.path, generation_config=config.model.generation_config)
        executor = {"executor": lazy(assignment.executor)()}
        parts = resolve(config, plugins, device, checkpoint.config, executor, assignment.first_device)
        if assignment.speculates and not parts.speculates:
            parts = evolve(parts, remote_speculator=True)
    with phases.phase("ranks"):
        group = join(assignment.rendezvous, device)
    return Deployment(config, parts, checkpoint, device).make_runner(group)
