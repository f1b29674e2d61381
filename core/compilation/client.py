"""The compile server, seen from the process that starts an engine."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Pipe
from queue import SimpleQueue

from engine.core.compilation.server import NUMBER_BYTES

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "engine.core.compilation.server")
CAN_FORK = hasattr(os, "fork")


class CompileServer:
    """A running compile server. Its process ends with the jobs, or with this process."""

    def __init__(self) -> None:
        """Start the process; it imports the kernels while this one goes on. Raises OSError."""
        self._connection, theirs = Pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with theirs:
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._futures: dict[int, Future[None]] = {}
        self._messages: SimpleQueue[bytes] = SimpleQueue()
        self.running = True
        """Whether jobs may be submitted: neither `close` was called nor has the process ended."""
        for work in (self._send, self._receive):
            threading.Thread(target=work, name="compile-server", daemon=True).start()

    def submit(self, job: bytes) -> Future[None]:
        """Have a job compiled. The future's result is None when the job is done, even if it has failed.

        Of the jobs that wait for a core, the server compiles the largest first.
        """
        future: Future[None] = Future()
        with self._lock:
            if not self.running:
                future.set_result(None)
                return future
            number = next(self._numbers)
            self._futures[number] = future
        self._messages.put(number.to_bytes(NUMBER_BYTES) + job)
        return future

    def close(self) -> None:
        """Let the process end once it has compiled all jobs. Does not wait."""
        with self._lock:
            if self.running:
                self.running = False
                self._messages.put(b"")

    def wait(self) -> None:
        """Wait for all jobs submitted so far."""
        with self._lock:
            futures = list(self._futures.values())
        for future in futures:
            future.result()

    def _send(self) -> None:
        """Run in a thread: a server that still imports does not read, and a pipe holds few jobs."""
        with suppress(OSError):  # the process has ended, which `_receive` sees
            while message := self._messages.get():
                self._connection.send_bytes(message)
            self._connection.send_bytes(b"")

    def _receive(self) -> None:
        """Run in a thread: resolve jobs as they are compiled, and all that are left when the process ends."""
        with suppress(EOFError, OSError):
            while True:
                answer = self._connection.recv_bytes()
                with self._lock:
                    future = self._futures.pop(int.from_bytes(answer[:NUMBER_BYTES]))
                if len(answer) > NUMBER_BYTES:
                    log.debug("a kernel was not compiled ahead: %s", answer[NUMBER_BYTES:].decode(errors="replace"))
                future.set_result(None)
        code = self._process.wait()
        with self._lock:
            self.running = False
            left = list(self._futures.values())
            self._futures.clear()
        self._messages.put(b"")  # ends the other thread
        self._connection.close()
        if code or left:
            log.warning(
                "the process that compiles kernels ahead ended with code %d; this process compiles the %d kernels left",
                code,
                len(left),
            )
        for future in left:
            future.set_result(None)


class SharedServer:
    """The compile server of a process, started when it is first needed."""

    def __init__(self) -> None:
        self._server: CompileServer | None = None

    def begin(self) -> CompileServer | None:
        """The running server; starts one if there is none. None if no server can run on this machine."""
        if self._server is not None and self._server.running:
            return self._server
        try:
            self._server = CompileServer() if CAN_FORK else None
        except OSError as error:
            log.warning("kernels are compiled one after another, since no process can be started: %s", error)
            self._server = None
        return self._server

    def wait(self) -> None:
        """Wait for all jobs submitted so far."""
        if self._server is not None:
            self._server.wait()

    def end(self) -> None:
        """Let the server end, if one runs, once it has compiled all jobs."""
        if self._server is not None:
            self._server.close()


SHARED = SharedServer()
"""One per process, as is Triton's record of the kernels compiled."""
