"""The compile server: a process that imports the kernels and forks a child for each job.

    python -P -m engine.core.compilation.server DESCRIPTOR

It needs no GPU and uses none: children could not be forked afterwards. A child compiles one kernel into Triton's cache
on disk and exits, so that a crash of the compiler costs that kernel alone. Of the jobs that wait for a core the largest
(job.source_size) is next: kernels of attention take seconds, and must not be the last to start.

Messages are those of multiprocessing.connection: a job is its number (4 bytes), its size (4 bytes) and the rest; the
answer is the number and the error's text, empty if there is none. An empty message ends the jobs. Without it, the end
of the connection means that the engine's process has ended, and the children are killed.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import selectors
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import frozen

from engine.core.collector import paused
from engine.core.host import Host

if TYPE_CHECKING:
    from engine.core.compilation.job import MakeLauncher

NUMBER_BYTES = 4
IDLE_SECONDS = 60.0
"""Time without a job after which the server exits."""
MAX_COMPILE_SECONDS = 300.0
"""Time after which a child is killed. The engine's process then compiles its kernel."""
MAX_ERROR_BYTES = 4096
"""Fits into a pipe that is not read yet."""
MAX_PROCESSES = 32
"""Children at a time: each has some 100 MB of its own, and a start has about 100 kernels."""
OFFSET_BYTES = 7
"""Bytes of the offset of a launcher's lock, which must be less than 2^63."""
NICENESS = 5
"""The process that starts the engine goes first."""


@frozen
class _Child:
    """A process that compiles one kernel."""

    pid: int
    number: int
    """Number of the job."""
    errors: int
    """Read end of a pipe to which the child writes its error, and which closes when the child ends."""
    deadline: float
    """When the child is killed, as time.monotonic()."""


class Server:
    """Compiles the jobs that arrive on a connection, as many at a time as there are cores."""

    def __init__(self, connection: Connection, processes: int, make_launcher: MakeLauncher | None) -> None:
        """make_launcher: as for Job.run."""
        self._connection = connection
        self._make_launcher = make_launcher
        self._processes = processes
        self._waiting: list[bytes] = []
        self._children: dict[int, _Child] = {}
        """By `_Child.errors`."""
        self._ended = False
        """Whether no further job will come."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the jobs end, or none has come for a while."""
        while self._waiting or self._children or not self._ended:
            ready = self._selector.select(self._seconds_left())
            if not ready:
                if not self._children:
                    return
                self._kill_late_children()
            for key, _ in ready:
                if key.fd in self._children:
                    self._finish(self._children.pop(key.fd))
                else:
                    self._receive()
            while self._waiting and len(self._children) < self._processes:
                self._start(self._next())

    def _next(self) -> bytes:
        """Take out the largest job that waits, of equal ones the first."""
        sizes = [message[NUMBER_BYTES : 2 * NUMBER_BYTES] for message in self._waiting]
        return self._waiting.pop(sizes.index(max(sizes)))

    def _seconds_left(self) -> float:
        """Timeout of the next wait: until the first child is late or, without children, until the server has idled long
        enough."""
        if not self._children:
            return IDLE_SECONDS
        return max(min(child.deadline for child in self._children.values()) - time.monotonic(), 0.0)

    def _receive(self) -> None:
        try:
            message = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise SystemExit(1) from None
        if message:
            self._waiting.append(message)
        else:
            self._ended = True
            self._selector.unregister(self._connection)

    def _start(self, message: bytes) -> None:
        errors, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            self._compile_and_exit(message[NUMBER_BYTES:], theirs)
        os.close(theirs)
        deadline = time.monotonic() + MAX_COMPILE_SECONDS
        self._children[errors] = _Child(pid, int.from_bytes(message[:NUMBER_BYTES]), errors, deadline)
        self._selector.register(errors, selectors.EVENT_READ)

    def _finish(self, child: _Child) -> None:
        """Answer the job of a child that has ended or is about to."""
        self._selector.unregister(child.errors)
        error = os.read(child.errors, MAX_ERROR_BYTES)
        os.close(child.errors)
        _, status = os.waitpid(child.pid, 0)
        if os.WIFSIGNALED(status):
            error = f"the compiler was ended by signal {os.WTERMSIG(status)}".encode()
        self._connection.send_bytes(child.number.to_bytes(NUMBER_BYTES) + error)

    def _kill_late_children(self) -> None:
        """Kill the children past their deadline; their pipes then end, so that `run` finishes them."""
        now = time.monotonic()
        for child in self._children.values():
            if child.deadline <= now:
                os.kill(child.pid, signal.SIGKILL)

    def kill_children(self) -> None:
        """Kill and await the children that run."""
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        self._children.clear()

    def _compile_and_exit(self, job: bytes, errors: int) -> NoReturn:
        """Compile in a child. The compiler's own messages are dropped: the engine compiles a failed kernel again."""
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            from engine.core.compilation.job import Job

            Job.decode(job).run(self._make_launcher)
        except BaseException as error:  # the child must not return into the server's loop
            os.write(errors, f"{type(error).__name__}: {error}".encode()[:MAX_ERROR_BYTES])
        finally:
            os._exit(0)


def prepare() -> MakeLauncher | None:
    """Import the kernels, once for all children. Returns what Job.run makes launchers with; None without a driver."""
    from triton.backends import backends
    from triton.runtime.cache import triton_key
    from triton.runtime.driver import driver

    # The C compiler, and reading all of Triton's compiler, leave the GIL to the imports.
    others = [threading.Thread(target=work) for work in (_make_driver_utilities, triton_key)]
    for other in others:
        other.start()
    import engine.ops
    from engine.core.compilation import job  # noqa: F401

    for module in pkgutil.walk_packages(engine.ops.__path__, "engine.ops."):
        with suppress(Exception):  # a kernel whose module cannot be imported is not needed, or its child fails
            importlib.import_module(module.name)
    for other in others:
        other.join()
    try:
        driver.set_active(backends["nvidia"].driver())
    except Exception:  # without the driver's library there are no launchers to compile
        return None
    return one_at_a_time(driver.active.launcher_cls)


def one_at_a_time(make_launcher: MakeLauncher) -> MakeLauncher:
    """Wrap make_launcher such that processes make equal launchers one after another.

    The first runs the C compiler, the others find its result on disk. Kernels with equal signatures have equal
    launchers, and children that compile such kernels often finish at the same time. Call it before they are forked.
    """
    import fcntl

    locks = os.memfd_create("launchers")

    def make(source: Any, metadata: Any) -> object:
        # Each launcher has one byte of a file, to lock. When a process ends, the kernel releases its locks.
        described = repr((list(source.signature.values()), getattr(metadata, "tensordesc_meta", None)))
        offset = int.from_bytes(sha256(described.encode()).digest()[:OFFSET_BYTES])
        fcntl.lockf(locks, fcntl.LOCK_EX, 1, offset)
        try:
            return make_launcher(source, metadata)
        finally:
            fcntl.lockf(locks, fcntl.LOCK_UN, 1, offset)

    return make


def _make_driver_utilities() -> None:
    """Compile what Triton calls the driver by, which the engine's process needs before its first kernel."""
    with suppress(Exception):  # there is no driver
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


def main() -> None:
    """Serve the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal; the connection's end ends this process
    warnings.simplefilter("ignore")
    os.nice(NICENESS)
    with paused(freeze=True), Connection(int(sys.argv[1])) as connection:
        make_launcher = prepare()
        server = Server(connection, min(Host().cores(), MAX_PROCESSES), make_launcher)
        try:
            server.run()
        except BrokenPipeError:  # the engine's process has ended
            pass
        finally:
            server.kill_children()


if __name__ == "__main__":
    main()
