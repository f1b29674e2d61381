"""A process that the supervisor has started, seen from there."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, Generic, TypeVar

from engine.core.wire import Decoder
from engine.server.control import LENGTH, frame

T = TypeVar("T")

DEATH_GRACE = 0.2
"""Seconds for the end of the connection to a dead process, which some child of its own may hold open."""


class Child(Generic[T]):
    """A running process and the connection to it; T: what it says."""

    def __init__(self, process: subprocess.Popen[bytes], kind: Any) -> None:
        """Use `start`."""
        self._process = process
        self._decoder: Decoder[T] = Decoder(kind)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._exited = asyncio.Event()

    @classmethod
    async def start(cls, command: Sequence[str], kind: Any, launch: Any, inherit: Sequence[int] = ()) -> Child[T]:
        """Start a process; `launch` is its first message, `inherit` the file descriptors that it gets, and `kind` the
        type of what it says."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = cls(subprocess.Popen(command, stdin=theirs.fileno(), pass_fds=inherit), kind)
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

    def kill(self) -> None:
        """Leave nothing behind, at once."""
        self._process.kill()
        self._process.wait()
        self._writer.transport.abort()

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
