"""A process that the supervisor has started, seen from there."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, Generic, TypeVar

from engine.core.executors import MessageDecoder
from engine.server.shared.control import LENGTH, frame

T = TypeVar("T")

PR_SET_CHILD_SUBREAPER = 36
"""See prctl(2)."""
POLL = 0.02
"""Seconds between two looks for processes that nobody tells about."""
DEATH_GRACE = 0.2
"""Seconds for the end of the connection to a dead process, which some child of its own may hold open."""


def adopt_orphans() -> None:
    """From now on this process is the parent of what its children leave behind, for Child.end_family to bury. Else they
    go to the first process, and in a container that one may bury nobody."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class Child(Generic[T]):
    """A running process and the connection to it; T: what it says."""

    def __init__(self, process: subprocess.Popen[bytes], kind: Any, leads: bool) -> None:
        """Use `start`."""
        self._process = process
        self._leads = leads
        self._decoder: MessageDecoder[T] = MessageDecoder(kind)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._exited = asyncio.Event()

    @classmethod
    async def start(
        cls, command: Sequence[str], kind: Any, launch: Any, inherit: Sequence[int] = (), *, leads: bool = False
    ) -> Child[T]:
        """Start a process; `launch` is its first message, `inherit` the file descriptors that it gets, and `kind` the
        type of what it says. leads: whether it leads a process group of its own, by which its own children are found.
        SIGINT is blocked in it from its first moment: a Ctrl-C reaches it too, but is for this process to act upon.
        Raises OSError when there can be no process.
        """
        ours, theirs = socket.socketpair()
        group = 0 if leads else None
        with theirs:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the process inherits
            try:
                process = subprocess.Popen(command, stdin=theirs.fileno(), pass_fds=inherit, process_group=group)
            except OSError:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        child = cls(process, kind, leads)
        child._watch()
        child._reader, child._writer = await asyncio.open_unix_connection(sock=ours)
        child.send(launch)
        return child

    def send(self, message: Any) -> None:
        """Tell it; in vain when it is dead."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def messages(self) -> AsyncIterator[T]:
        """What it says until it is dead. Raises EngineError for what is no message."""
        end = asyncio.ensure_future(self._wait_and_linger())
        try:
            while True:
                read = asyncio.ensure_future(self._read())
                await asyncio.wait((read, end), return_when=asyncio.FIRST_COMPLETED)
                data = read.result() if read.done() else None
                if data is None:
                    read.cancel()
                    break
                yield self._decoder.decode(data)
            await self._exited.wait()
        finally:
            end.cancel()

    async def wait(self) -> None:
        """Until it is dead."""
        await self._exited.wait()

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    @property
    def fate(self) -> str:
        """How a dead process ended, as "was killed by SIGKILL"."""
        code = self._process.returncode
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        return f"exited with code {code}"

    def strike(self) -> None:
        """Kill it, and the group that it leads; not dead yet on return."""
        if self._leads and self._process.poll() is None:  # else the number may be another group's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def kill(self) -> None:
        """Leave nothing behind, at once."""
        self.strike()
        self._process.wait()
        self._writer.transport.abort()

    async def end_family(self) -> None:
        """Kill what a dead process that led a group has left there, and wait until it is gone."""
        group = self._process.pid
        while True:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                return
            with contextlib.suppress(ChildProcessError):  # there are none that this process has adopted
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            await asyncio.sleep(POLL)

    async def _wait_and_linger(self) -> None:
        await self._exited.wait()
        await asyncio.sleep(DEATH_GRACE)

    async def _read(self) -> bytes | None:
        """One message; None at the end."""
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH), "big")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def _watch(self) -> None:
        """Set `_exited` when the process ends, however it ends."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            self._process.wait()
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._exited.set)

        threading.Thread(target=wait, name="child", daemon=True).start()
