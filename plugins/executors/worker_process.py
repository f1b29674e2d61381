"""A worker process, seen from the executor's process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.plugins.executors.control_messages import Connection, FromWorker, Launch, socket_pair
from engine.plugins.executors.heartbeat import WorkerHeartbeat
from engine.plugins.executors.stacks import busy_stack

STATES = {"T": "it is stopped (SIGSTOP)", "t": "it is stopped by a debugger", "D": "it waits in the kernel"}
"""Process state in /proc/PID/stat -> why the process writes no stack."""


class WorkerProcess:
    """A running worker. The thread that constructs it must outlive it: the kernel kills the worker with that thread."""

    def __init__(self, module: str, launch: Launch, heartbeat: WorkerHeartbeat, inherit: Sequence[int]) -> None:
        """Start the process.

        module: what the process runs; inherit: file descriptors that it inherits, next to `launch.stack`, which this
        object then owns. Raises OSError, with nothing left of the worker, if it cannot be started.
        """
        self.rank = launch.rendezvous.rank
        self.heartbeat = heartbeat
        self.phase = "start"
        """Current phase of the start; empty once the worker is ready."""
        self._stack = launch.stack
        with ExitStack() as undo:
            undo.callback(os.close, launch.stack)
            ours, theirs = socket_pair()
            undo.callback(ours.close)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), launch.stack, *inherit),
                )
            undo.callback(self.reap)
            undo.callback(self.kill)
            self.pidfd = os.pidfd_open(self._process.pid)
            """File descriptor that becomes readable when the process exits."""
            undo.pop_all()
        ours.setblocking(False)
        self.connection: Connection[FromWorker] = Connection(ours, FromWorker)
        try:
            self.connection.send(launch)
        except OSError:  # the process has exited already, which `pidfd` shows
            return

    @property
    def alive(self) -> bool:
        """Whether the process has not been reaped."""
        return self._process.returncode is None

    def reap(self) -> None:
        """Collect the exit status of a process that has exited."""
        self._process.wait()

    def kill(self) -> None:
        """Kill the process immediately, even if it is stopped."""
        self._process.kill()

    def close(self) -> None:
        """Close the file descriptors."""
        self.connection.close()
        os.close(self.pidfd)
        os.close(self._stack)

    def __str__(self) -> str:
        return f"the worker of rank {self.rank} (process {self._process.pid})"

    @property
    def exit_status(self) -> str:
        """How the process ended, as a sentence."""
        code = self._process.returncode
        place = f" in {self.phase}" if self.phase else ""
        if not place and self.heartbeat.begun != self.heartbeat.finished:
            place = f" in step {self.heartbeat.step}"
        if code is None or code >= 0:
            return f"{self} exited with code {code}{place}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = "; if the machine ran out of memory, its kernel's log says so" if name == "SIGKILL" else ""
        return f"{self} was killed by {name}{place}{hint}"

    def request_stack(self) -> None:
        """Ask the process to write a stack dump."""
        os.ftruncate(self._stack, 0)
        self._process.send_signal(signal.SIGUSR1)

    def read_stack(self, until: float) -> tuple[str, str]:
        """Wait for the requested stack dump, until time.monotonic() is `until`.

        Returns a sentence, the busy thread's stack or why there is none, and the whole dump.
        """
        dump, before = "", None
        while (not dump or dump != before) and time.monotonic() < until:
            time.sleep(0.02)
            before, dump = dump, os.pread(self._stack, 2**16, 0).replace(b"\0", b"").decode(errors="replace")
        stack = busy_stack(dump, self.heartbeat.busy_threads)
        if stack:
            return stack, dump
        if self._process.poll() is not None:
            return self.exit_status, dump
        state = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return f"it gives no stack: {STATES.get(state, 'it does not take signals')}", dump
