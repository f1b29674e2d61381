"""A process started by the supervisor, seen from the supervisor."""

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
from engine.server.shared.supervisor_link import LENGTH_BYTES, frame

T = TypeVar("T")

PR_SET_CHILD_SUBREAPER = 36
"""See prctl(2)."""
POLL_SECONDS = 0.02
"""Interval between polls for processes whose exit is not notified."""
EXIT_GRACE = 0.2
"""Seconds to wait for the end of the link to an exited process, whose own children may hold the link open."""


def become_subreaper() -> None:
    """Make this process the parent of all orphaned descendants, so that Child.kill_process_group can reap them.

    Otherwise orphans go to the first process, which in a container may reap none.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class Child(Generic[T]):
    """A child process and the link to it. T: messages that the child sends."""

    def __init__(self, process: subprocess.Popen[bytes], kind: Any, leads_group: bool) -> None:
        """Use `start`."""
        self._process = process
        self._leads_group = leads_group
        self._decoder: MessageDecoder[T] = MessageDecoder(kind)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._closing: asyncio.Future[None]
        self._exited = asyncio.Event()

    @classmethod
    async def start(
        cls, command: Sequence[str], kind: Any, launch: Any, inherit: Sequence[int] = (), *, leads_group: bool = False
    ) -> Child[T]:
        """Start a process and send it the message `launch`.

        kind: type of the messages that the process sends. inherit: file descriptors passed to the process.
        leads_group: put the process into a process group of its own, so that its descendants can be killed.
        SIGINT is blocked in the process from the start: Ctrl-C reaches the process too, but the supervisor handles it.
        Raises OSError when the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        group = 0 if leads_group else None
        with theirs:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the process inherits
            try:
                process = subprocess.Popen(command, stdin=theirs.fileno(), pass_fds=inherit, process_group=group)
            except OSError:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        child = cls(process, kind, leads_group)
        child._watch()
        child._reader, child._writer = await asyncio.open_unix_connection(sock=ours)
        child._closing = asyncio.ensure_future(child._read_error_of_link())
        child.send(launch)
        return child

    def send(self, message: Any) -> None:
        """Send a message; a no-op if the process has exited."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def messages(self) -> AsyncIterator[T]:
        """Yield the process's messages until the process has exited. Raises EngineError for an unreadable message."""
        exited = asyncio.ensure_future(self._wait_with_grace())
        try:
            while True:
                read = asyncio.ensure_future(self._read())
                await asyncio.wait((read, exited), return_when=asyncio.FIRST_COMPLETED)
                data = read.result() if read.done() else None
                if data is None:
                    read.cancel()
                    break
                yield self._decoder.decode(data)
            await self._exited.wait()
        finally:
            exited.cancel()

    async def wait(self) -> None:
        """Wait until the process has exited."""
        await self._exited.wait()

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    @property
    def exit_status(self) -> str:
        """How the process ended, for example "was killed by SIGKILL"."""
        code = self._process.returncode
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        return f"exited with code {code}"

    def kill(self) -> None:
        """Send SIGKILL to the process and to the process group it leads, without waiting for the exit."""
        if self._leads_group and self._process.poll() is None:  # else the number may be another group's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def kill_and_reap(self) -> None:
        """Kill the process, block until it has exited, and close the link."""
        self.kill()
        self._process.wait()
        self._writer.transport.abort()

    async def kill_process_group(self) -> None:
        """Kill and reap what is left of the process group that an exited process led."""
        group = self._process.pid
        while True:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                return
            with contextlib.suppress(ChildProcessError):  # no orphan of the group is a child of this process
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            await asyncio.sleep(POLL_SECONDS)

    async def _wait_with_grace(self) -> None:
        await self._exited.wait()
        await asyncio.sleep(EXIT_GRACE)

    async def _read(self) -> bytes | None:
        """Read one message; None at the end of the link."""
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _read_error_of_link(self) -> None:
        """Read the error of a message to a process that has exited: asyncio logs errors that nothing has read."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _watch(self) -> None:
        """Start a thread that sets `_exited` when the process exits."""
        loop = asyncio.get_running_loop()

        def wait() -> None:
            self._process.wait()
            with contextlib.suppress(RuntimeError):  # the event loop is closed, so no task waits
                loop.call_soon_threadsafe(self._exited.set)

        threading.Thread(target=wait, name="child", daemon=True).start()
