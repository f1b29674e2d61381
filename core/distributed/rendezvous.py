"""How the ranks that share a model find each other."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from attrs import frozen

from engine.core.errors import ExecutorError

TIMEOUT = 600.0
"""Default timeout of an operation that waits for other ranks, seconds."""


@frozen(kw_only=True)
class Rendezvous:
    """Where one rank finds the others and how long it waits for them. Plain data for `join`."""

    rank: int
    ranks: int
    place: str
    """On one host: path of a file that all ranks see, empty or not existing yet. The ranks write it; it may be deleted
    once the group is closed. On several hosts: the `place` of a MeetingPoint, tcp://HOST:PORT."""
    host: str = "127.0.0.1"
    """An address of this rank's host at which other ranks on CPUs reach it."""
    timeout: float = TIMEOUT
    """Timeout of an operation that waits for other ranks, seconds. On a GPU, NCCL's watchdog ends the process of a rank
    that waits longer. It does not watch operations replayed in CUDA graphs, so the executor must watch the ranks too.
    """
    peer_memory: bool = True
    """On GPUs: whether small all-reduces use kernels that reach the other GPUs' memory, where possible. False for ranks
    on several hosts."""


class MeetingPoint:
    """A TCP store, in one rank's process, through which ranks on several hosts find each other."""

    def __init__(self, host: str) -> None:
        """Listen at a free port of address `host`, at which the other hosts reach this one, and at no other address.

        Raises ExecutorError if that is not possible.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ExecutorError(
                f"the ranks cannot meet at {host}, which is not an address of this host: {error}"
            ) from error
        self._host, self._port = self._listening.getsockname()[:2]
        self._store: Any = None
        self.place = f"tcp://[{host}]:{self._port}" if family == socket.AF_INET6 else f"tcp://{host}:{self._port}"
        """Rendezvous.place of every rank. Ranks that connect before `serve` wait."""

    def serve(self) -> None:
        """Serve the store in a thread. Called once, before this rank joins. Imports torch."""
        import torch

        c10d: Any = torch._C._distributed_c10d
        self._store = c10d.TCPStore(
            self._host,
            self._port,
            is_master=True,
            timeout=timedelta(seconds=TIMEOUT),
            wait_for_workers=False,
            master_listen_fd=self._listening.detach(),
        )
