"""A worker, seen from the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine.plugins.executors.messages import Connection, FromWorker, Launch, socket_pair
from engine.plugins.executors.progress import Beat
from engine.plugins.executors.stacks import busy_stack

STATES = {"T": "it is stopped (SIGSTOP)", "t": "it is stopped by a debugger", "D": "it waits in the kernel"}
"""By the letter in /proc/PID/stat: why there is no stack."""


class WorkerProcess:
    """A running process. The thread that makes it must outlive it: the worker is killed when that thread ends."""

    def __init__(self, module: str, launch: Launch, beat: Beat, inherit: Sequence[int]) -> None:
        """module: what to run; inherit: the file descriptors that it gets beside `launch.stack`, which is then its
        alone."""
        self.rank = launch.rendezvous.rank
        self.beat = beat
        self.phase = "start"
        """Of its start; empty once it is ready."""
        self._stack = launch.stack
        ours, theirs = socket_pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), launch.stack, *inherit),
            )
        self.death = os.pidfd_open(self._process.pid)
        """Readable when the process is dead."""
        ours.setblocking(False)
        self.connection: Connection[FromWorker] = Connection(ours, FromWorker)
        try:
            self.connection.send(launch)
        except OSError:  # dead already, which `death` tells
            return

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped."""
        return self._process.returncode is None

    def reap(self) -> None:
        """It is dead: take its exit code."""
        self._process.wait()

    def kill(self) -> None:
        """Leave nothing behind, at once; also of a process that is stopped."""
        self._process.kill()

    def close(self) -> None:
        """Give back the descriptors."""
        self.connection.close()
        os.close(self.death)
        os.close(self._stack)

    def __str__(self) -> str:
        return f"the worker of rank {self.rank} (process {self._process.pid})"

    @property
    def fate(self) -> str:
        """How it ended, as a sentence."""
        code = self._process.returncode
        place = f" in {self.phase}" if self.phase else ""
        if not place and self.beat.begun != self.beat.finished:
            place = f" in step {self.beat.begun}"
        if code is None or code >= 0:
            return f"{self} exited with code {code}{place}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = "; if the machine ran out of memory, its kernel's log says so" if name == "SIGKILL" else ""
        return f"{self} was killed by {name}{place}{hint}"

    def ask_stack(self) -> None:
        """Have it write its stack."""
        os.ftruncate(self._stack, 0)
        self._process.send_signal(signal.SIGUSR1)

    def stack(self, until: float) -> tuple[str, str]:
        """Where it was when asked: (its stack in a sentence, all that it wrote), or why it wrote nothing.

        until: how long to wait for it, time.monotonic().
        """
        text, before = "", None
        while (not text or text != before) and time.monotonic() < until:
            time.sleep(0.02)
            before, text = text, os.pread(self._stack, 2**16, 0).replace(b"\0", b"").decode(errors="replace")
        place = busy_stack(text)
        if place:
            return place, text
        if self._process.poll() is not None:
            return self.fate, text
        state = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return f"it gives no stack: {STATES.get(state, 'it does not take signals')}", text
