"""What every worker does, whatever started it: it makes its runner, runs steps as they come, and tells how it goes."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from attrs import evolve

from engine.core.executors import MessageDecoder, PendingResult
from engine.core.shm import RingClosedError, RingTimeoutError
from engine.core.startup import Phases, Progress
from engine.core.types import CacheInfo, Step, StepResult
from engine.plugins.executors.messages import ERRORS, Assignment, Failed, Progressed, Ready
from engine.plugins.executors.progress import Beat
from engine.plugins.executors.results import Answers

if TYPE_CHECKING:
    from engine.core.runner import Runner

A = TypeVar("A", bound=Assignment)

BEAT_SECONDS = 0.5
"""How long an idle loop waits before it goes round."""
PROGRESS_SECONDS = 0.05
"""Between two reports of one phase."""
MOST_CHARS = 10_000
"""Of an error and of its traceback."""
HINTS = {
    "OutOfMemoryError": "use a lower --max-batch-tokens, --max-running or --memory-fraction, and look who else uses "
    "the device",
    "MemoryError": "use a lower --kv-memory or --memory-fraction, and look who else uses the machine",
    "ModuleNotFoundError": "install what is missing in the Python environment that the engine runs in",
}
"""By an error's class: what may help."""


class StepRunner(Protocol):
    """As much of core.runner.Runner as a worker uses."""

    def start(self, phases: Phases) -> CacheInfo:
        """Load the model and make the cache."""

    def launch(self, step: Step) -> PendingResult:
        """Begin a step."""


class Wires(Protocol):
    """What joins a worker to its executor. `tell` and `answer` are called in a thread of their own too."""

    def receive(self, timeout: float) -> bytes:
        """The next step. Raises RingTimeoutError after so many seconds, and RingClosedError when no more will come."""

    def answer(self, result: StepResult) -> None:
        """A step is done. Every rank says so, though rank 0's result is the one that counts."""

    def tell(self, message: Progressed | Ready) -> None:
        """How the start goes."""

    def fail(self, failed: Failed) -> None:
        """The worker cannot start, or cannot go on."""


class WorkerLoop:
    """One life of a worker."""

    def __init__(self, assignment: Assignment, beat: Beat, wires: Wires) -> None:
        self.phase = "start"
        """What it is about."""
        self._rendezvous = assignment.rendezvous
        self._beat = beat
        self._wires = wires
        self._told = 0.0
        self._decoder: MessageDecoder[Step] = MessageDecoder(Step)
        self._runner: StepRunner

    def run(self, make: Callable[[Phases], StepRunner]) -> None:
        """Make the runner, say that it is ready, and work until no more steps come. An error is told, not raised."""
        try:
            self.start(make)
            self.work()
        except BaseException as error:
            self._fail(self.phase, error)

    def start(self, make: Callable[[Phases], StepRunner]) -> None:
        """Make the runner, and say that it is ready."""
        phases = Phases(self._tell)
        self._runner = make(phases)
        cache = self._runner.start(phases)
        gc.collect()
        gc.freeze()  # what start-up made lives on; later collections need not look at it
        self._beat.beat()
        self._wires.tell(Ready(cache))
        self.phase = "its loop"

    def work(self) -> None:
        """Run steps until no more come.

        The next step is begun as soon as it is there, and the result of the one before leaves as soon as that is there:
        the first by this thread, the second by another, both asleep while there is nothing to do.
        """
        answers = Answers(self._answer, self._fail)
        while True:
            self._beat.beat()
            try:
                step = self._decoder.decode(self._wires.receive(BEAT_SECONDS))
            except RingTimeoutError:
                continue
            except RingClosedError:
                answers.end()
                return
            answers.make_room()
            self.phase = f"step {step.id}"
            self._beat.begin(step.id)
            answers.add(step.id, self._runner.launch(step))

    def _answer(self, step: int, pending: PendingResult) -> None:
        """Wait for a step that is under way. Each rank does, so that each tells of its device's errors."""
        self._wires.answer(pending.result())
        self._beat.done(step)

    def _fail(self, phase: str, error: BaseException) -> None:
        """Tell what ends this life, in whichever thread it happened."""
        names = [cls.__name__ for cls in type(error).__mro__]
        self._wires.fail(
            Failed(
                phase=phase,
                kind=names[0],
                known=next((cls.__name__ for cls in type(error).__mro__ if cls in ERRORS), ""),
                message=str(error)[:MOST_CHARS],
                hint=next((HINTS[name] for name in names if name in HINTS), ""),
                traceback="".join(traceback.format_exception(error))[-MOST_CHARS:],
            )
        )

    def _tell(self, progress: Progress) -> None:
        """Report a phase; not too often, for each report is a message."""
        now = time.monotonic()
        ended = progress.total and progress.done == progress.total
        if progress.phase == self.phase and not ended and now - self._told < PROGRESS_SECONDS:
            return
        self.phase, self._told = progress.phase, now
        rank = self._rendezvous.rank if self._rendezvous.ranks > 1 else None
        self._wires.tell(Progressed(evolve(progress, rank=rank)))


def make_runner(assignment: Assignment, phases: Phases) -> Runner:
    """A runner with the plugins that the executor's process has chosen."""
    with phases.phase("import"):
        from engine.core.runner import Runner  # noqa: F401  (most of the import time, counted where it happens)
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
        parts = resolve(config, plugins, device, checkpoint.config, executor, assignment.first)
    with phases.phase("ranks"):
        group = join(assignment.rendezvous, device)
    return Deployment(config, parts, checkpoint, device).make_runner(group)
