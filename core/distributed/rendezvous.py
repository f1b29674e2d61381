"""Where ranks that share a model find each other."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from attrs import frozen

from engine.core.errors import ExecutorError

TIMEOUT = 600.0
"""Seconds that an operation waits for the other ranks."""


@frozen(kw_only=True)
class Rendezvous:
    """Where one rank finds the others, and how long it waits for them: plain data, for distributed.join."""

    rank: int
    ranks: int
    place: str
    """Ranks on one host: the path of a file that all of them see, empty or not there yet; it is theirs to write, and
    may be deleted once the group is closed. On several: the place of a MeetingPoint, tcp://HOST:PORT."""
    host: str = "127.0.0.1"
    """An address of this rank's own host, where ranks on CPUs reach it."""
    timeout: float = TIMEOUT
    """Seconds an operation waits for the other ranks. On a GPU a rank that waits longer ends its process (NCCL's
    watchdog); operations replayed in CUDA graphs are not watched, so whoever starts the ranks must watch them too."""
    peer_memory: bool = True
    """On GPUs: whether small sums go by kernels that read the other GPUs' memory, where that is possible; not for ranks
    on several hosts."""


class MeetingPoint:
    """Where ranks on several hosts find each other: on the host of one of them, for as long as it lives."""

    def __init__(self, host: str) -> None:
        """host: the address of this host at which the others reach it; it listens there alone, at a free port.

        Raises ExecutorError if it cannot.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ExecutorError(
                f"the ranks cannot meet at {host}, which is no address of this host: {error}"
            ) from error
        self._host, self._port = self._listening.getsockname()[:2]
        self._store: Any = None
        self.place = f"tcp://[{host}]:{self._port}" if family == socket.AF_INET6 else f"tcp://{host}:{self._port}"
        """For Rendezvous.place, of every rank; those that come before `serve` wait."""

    def serve(self) -> None:
        """Tell those who come of each other, in a thread; called once, before this rank joins. Imports torch."""
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
