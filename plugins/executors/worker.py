"""A worker: the process that has one device. It takes steps from a ring; rank 0 puts what they sampled into another."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from engine.core.executors import encode
from engine.core.shm import Ring, RingClosedError, RingWriter
from engine.core.startup import Phases
from engine.core.types import StepResult
from engine.plugins.executors.messages import Connection, Failed, Launch, Progressed, Ready
from engine.plugins.executors.progress import Beats
from engine.plugins.executors.worker_loop import StepRunner, WorkerLoop, make_runner

PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


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
    rank = launch.rendezvous.rank
    logging.basicConfig(format=f"%(asctime)s %(levelname)s worker {rank}: %(message)s")
    faulthandler.register(signal.SIGUSR1, file=launch.stack, all_threads=True)
    beat = Beats(launch.beats, launch.rendezvous.ranks).row(rank)
    WorkerLoop(launch, beat, _Rings(control, launch)).run(lambda phases: make(launch, phases))
    return 0


class _Rings:
    """See Wires."""

    def __init__(self, control: Connection[Launch], launch: Launch) -> None:
        self._control = control
        self._steps = Ring.attach(launch.steps).reader(launch.rendezvous.rank)
        self._results: RingWriter | None = None
        if launch.results is not None:
            self._results = Ring.attach(launch.results).writer()

    def receive(self, timeout: float) -> bytes:
        return self._steps.receive(timeout)

    def answer(self, result: StepResult) -> None:
        if self._results is not None:
            with suppress(RingClosedError):  # nobody wants it any more; the ring of steps has ended too
                self._results.send(encode(result))

    def tell(self, message: Progressed | Ready) -> None:
        self._control.send(message)

    def fail(self, failed: Failed) -> None:
        """End the process, whatever its other thread is about."""
        self._control.send(failed)
        sys.stderr.flush()
        os._exit(1)


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends: the executor's own, which outlives its workers."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before
        sys.exit(1)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The device is freed with the process; libraries taken down in order might wait for other ranks.
    os._exit(code)
