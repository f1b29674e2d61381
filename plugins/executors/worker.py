"""A worker: the process that has one device. It takes steps from a ring; rank 0 puts what they sampled into another."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from attrs import evolve

from engine.core.executors import PendingResult
from engine.core.shm import Ring, RingClosedError, RingReader, RingTimeoutError, RingWriter
from engine.core.startup import Phases, Progress
from engine.core.types import CacheInfo, Step
from engine.core.wire import Decoder, encode
from engine.plugins.executors.answers import Answers
from engine.plugins.executors.beats import Beat, Beats
from engine.plugins.executors.messages import ERRORS, Connection, Failed, Launch, Ready, Told

if TYPE_CHECKING:
    from engine.core.runner import Runner

BEAT_SECONDS = 0.5
"""How long an idle loop waits before it goes round."""
PROGRESS_SECONDS = 0.05
"""Between two reports of one phase."""
MOST_CHARS = 10_000
"""Of an error and of its traceback."""
PR_SET_PDEATHSIG = 1
"""See prctl(2)."""
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


def main() -> int:
    """Run until told to stop; returns the exit code."""
    return run(make_runner)


def run(make: Callable[[Launch, Phases], StepRunner]) -> int:
    """The whole life of the process, around the runner that `make` gives. Arguments: descriptor, parent's number."""
    descriptor, parent = map(int, sys.argv[1:])
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine's process decides
    control: Connection[Launch] = Connection(socket.socket(fileno=descriptor), Launch)
    launch = control.receive()
    if launch is None:
        return 1
    logging.basicConfig(format=f"%(asctime)s %(levelname)s worker {launch.rank}: %(message)s")
    faulthandler.register(signal.SIGUSR1, file=launch.stack, all_threads=True)
    worker = _Worker(control, launch)
    try:
        worker.start(make)
        worker.work()
    except BaseException as error:
        control.send(_failed(worker.phase, error))
        return 1
    return 0


class _Worker:
    """One life of the process."""

    def __init__(self, control: Connection[Launch], launch: Launch) -> None:
        self.phase = "start"
        """What it is about."""
        self._control = control
        self._launch = launch
        self._told = 0.0
        self._beat: Beat = Beats(launch.beats, launch.ranks).row(launch.rank)
        self._steps: RingReader = Ring.attach(launch.steps).reader(launch.rank)
        self._results: RingWriter | None = None
        if launch.results is not None:
            self._results = Ring.attach(launch.results).writer()
        self._decoder: Decoder[Step] = Decoder(Step)
        self._runner: StepRunner

    def start(self, make: Callable[[Launch, Phases], StepRunner]) -> None:
        """Make the runner, and say that it is ready."""
        phases = Phases(self._tell)
        self._runner = make(self._launch, phases)
        cache = self._runner.start(phases)
        gc.collect()
        gc.freeze()  # what start-up made lives on; later collections need not look at it
        self._beat.beat()
        self._control.send(Ready(cache))
        self.phase = "its loop"

    def work(self) -> None:
        """Run steps until the ring of steps ends.

        The next step is begun as soon as it is there, and the result of the one before leaves as soon as that is there:
        the first by this thread, the second by another, both asleep while there is nothing to do.
        """
        answers = Answers(self._answer, self._fail)
        while True:
            self._beat.beat()
            try:
                step = self._decoder.decode(self._steps.receive(BEAT_SECONDS))
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
        result = pending.result()
        if self._results is not None:
            try:
                self._results.send(encode(result))
            except RingClosedError:  # nobody wants it any more; the ring of steps has ended too
                return
        self._beat.done(step)

    def _fail(self, phase: str, error: BaseException) -> None:
        """End the process, whatever its other thread is about."""
        self._control.send(_failed(phase, error))
        sys.stderr.flush()
        os._exit(1)

    def _tell(self, progress: Progress) -> None:
        """Report a phase; not too often, for each report is a message."""
        now = time.monotonic()
        ended = progress.total and progress.done == progress.total
        if progress.phase == self.phase and not ended and now - self._told < PROGRESS_SECONDS:
            return
        self.phase, self._told = progress.phase, now
        rank = self._launch.rank if self._launch.ranks > 1 else None
        self._control.send(Told(evolve(progress, rank=rank)))


def make_runner(launch: Launch, phases: Phases) -> Runner:
    """A runner with the plugins that the executor's process has chosen."""
    with phases.phase("import"):
        from engine.core.runner import Runner
    from engine.core.checkpoint import Checkpoint
    from engine.core.device import find_device
    from engine.core.distributed import Rendezvous, join
    from engine.core.hooks import lazy
    from engine.core.registry import load_plugins
    from engine.core.selection import resolve

    config = launch.config
    with phases.phase("device"):
        device = find_device(launch.device)
    with phases.phase("plugins"):
        plugins = load_plugins(config.plugins)
        plugins.verify(launch.manifest)
        checkpoint = Checkpoint.open(config.model.path, generation_config=config.model.generation_config)
        parts = resolve(config, plugins, device, checkpoint.config, {"executor": lazy(launch.executor)()})
    with phases.phase("ranks"):
        group = join(Rendezvous(rank=launch.rank, ranks=launch.ranks, path=launch.store), device)
    return Runner(config, parts, checkpoint, device, group)


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends: the executor's own, which outlives its workers."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before
        sys.exit(1)


def _failed(phase: str, error: BaseException) -> Failed:
    names = [cls.__name__ for cls in type(error).__mro__]
    return Failed(
        phase=phase,
        kind=names[0],
        known=next((cls.__name__ for cls in type(error).__mro__ if cls in ERRORS), ""),
        message=str(error)[:MOST_CHARS],
        hint=next((HINTS[name] for name in names if name in HINTS), ""),
        traceback="".join(traceback.format_exception(error))[-MOST_CHARS:],
    )


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The device is freed with the process; libraries taken down in order might wait for other ranks.
    os._exit(code)
