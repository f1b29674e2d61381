"""A worker process of `multiproc` or `tp`: runs the steps of a ring on one device; rank 0 sends results by a ring."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from engine.core.executors import Answer, encode
from engine.core.logs import configure, worker_process
from engine.core.shm import Ring, RingClosedError, RingWriter
from engine.core.startup import Phases
from engine.core.types import StepResult
from engine.plugins.executors.control_messages import Connection, Failed, Launch, Progressed, Ready
from engine.plugins.executors.heartbeat import HeartbeatTable
from engine.plugins.executors.worker_loop import StepRunner, WorkerLoop, make_runner

PR_SET_PDEATHSIG = 1
"""See prctl(2)."""


def main() -> int:
    """Run a worker until its ring of steps ends; return the exit code."""
    return run(make_runner)


def run(make: Callable[[Launch, Phases], StepRunner]) -> int:
    """Run a worker around the runner that `make` returns.

    Command line arguments: descriptor of the control socket, process id of the parent.
    """
    descriptor, parent = map(int, sys.argv[1:])
    _exit_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine's process decides
    control: Connection[Launch] = Connection(socket.socket(fileno=descriptor), Launch)
    launch = control.receive()
    if launch is None:
        return 1
    rank = launch.rendezvous.rank
    server = launch.config.server
    configure(worker_process(rank), style=server.log_format, level=server.log_level)
    faulthandler.register(signal.SIGUSR1, file=launch.stack, all_threads=True)
    heartbeat = HeartbeatTable(launch.heartbeats, launch.rendezvous.ranks).row(rank)
    WorkerLoop(launch, heartbeat, _RingLink(control, launch)).run(lambda phases: make(launch, phases))
    return 0


class _RingLink:
    """ExecutorLink over rings for steps and results and a socket for all other messages."""

    def __init__(self, control: Connection[Launch], launch: Launch) -> None:
        self._control = control
        self._steps = Ring.attach(launch.steps).reader(launch.rendezvous.rank)
        self._results: RingWriter | None = None
        if launch.results is not None:
            self._results = Ring.attach(launch.results).writer()

    def receive(self, timeout: float) -> bytes:
        return self._steps.receive(timeout)

    def send_result(self, result: StepResult) -> None:
        if self._results is not None:
            with suppress(RingClosedError):  # the executor has ended both rings
                self._results.send(encode(result))

    def send_answer(self, answer: Answer) -> None:
        self._control.send(answer)

    def report(self, message: Progressed | Ready) -> None:
        self._control.send(message)

    def fail(self, failed: Failed) -> None:
        """Report the error and end the process, whatever its other threads do."""
        self._control.send(failed)
        sys.stderr.flush()
        os._exit(1)


def _exit_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends. An orderly exit comes before."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent exited before the call
        sys.exit(1)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # The device is freed with the process; an orderly shutdown of libraries could wait for other ranks.
    os._exit(code)
