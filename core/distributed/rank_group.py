"""Ranks that share one model: sums, gathers and broadcasts among them. One rank alone has nothing to exchange.

Every rank calls the same operations in the same order, with tensors of the same shapes: all follow from the steps, and
those are the same for all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch

from engine.core.distributed.rendezvous import Rendezvous
from engine.core.errors import ExecutorError

if TYPE_CHECKING:
    from engine.core.device import DeviceInfo
    from engine.core.distributed.peer_memory import PeerMemory
    from engine.ops.norm.all_reduce_rms_norm import RowSums

_c10d: Any = torch._C._distributed_c10d  # torch.distributed lacks the options, and types


class RankGroup(ABC):
    """One rank's end of what joins the ranks. Layers are given it; nothing looks it up.

    Operations on a GPU's tensors are launched in the present stream and may be captured in a CUDA graph, once each has
    run outside of one.
    """

    rank: int
    ranks: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, the same on all to the last bit; `x` may be overwritten, and may be the result."""

    def row_sums(self, size: int, dtype: torch.dtype) -> RowSums | None:
        """Memory for sums of few rows of so many numbers by a kernel of the caller's; None: there is none, use
        `all_reduce`. Called by all ranks alike."""
        return None

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x: [ranks, *x.shape]."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """x as rank 0 has it; `x` itself, overwritten on the other ranks."""

    @abstractmethod
    def minimum(self, number: int) -> int:
        """The smallest of all ranks' numbers; waits for them."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group; a second call does nothing."""


class OneRank(RankGroup):
    """The only rank of its model."""

    rank = 0
    ranks = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[1, *x.shape]."""
        return x[None]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x

    def minimum(self, number: int) -> int:
        """The number."""
        return number

    def close(self) -> None:
        """Nothing to leave."""


def join(rendezvous: Rendezvous, device: DeviceInfo) -> RankGroup:
    """Join the other ranks: by gloo with a CPU, by NCCL with a GPU; waits for all of them.

    The group is no part of torch's global ones. Raises ExecutorError, naming the rank, if the others do not come.
    """
    rank, ranks = rendezvous.rank, rendezvous.ranks
    if ranks == 1:
        return OneRank()
    timeout = timedelta(seconds=rendezvous.timeout)
    with _Attributed(rank, ranks, "joining the others"):
        store = _store(rendezvous)
        store.set_timeout(timeout)
        if device.type == "cpu":
            return TorchGroup(rank, ranks, _gloo(store, rendezvous, timeout), torch.device("cpu"))
        torch.cuda.set_device(device.index)
        group = TorchGroup(rank, ranks, _nccl(store, rank, ranks, timeout), torch.device(device.torch_name))
        if rendezvous.peer_memory:
            from engine.core.distributed.peer_memory import PeerMemory

            group.peers = PeerMemory.open(group, _c10d.PrefixStore("peer_memory", store))
        return group


class TorchGroup(RankGroup):
    """Ranks joined by one of torch's backends."""

    def __init__(self, rank: int, ranks: int, backend: _Backend, device: torch.device) -> None:
        """Does each operation once: connections are made, and memory is taken, when one is first used."""
        self.rank = rank
        self.ranks = ranks
        self.peers: PeerMemory | None = None
        """Takes over the sums that it is made for."""
        self._backend: _Backend | None = backend
        self._device = device
        self._sum, self._least = _options(_c10d.AllreduceOptions), _options(_c10d.AllreduceOptions)
        self._least.reduceOp = _c10d.ReduceOp.MIN
        self._gather = _options(_c10d.AllgatherOptions)
        self._from_first = _options(_c10d.BroadcastOptions)
        self._from_first.rootRank = 0
        trial = torch.ones(1, device=device)
        self.all_reduce(trial)
        self.all_gather(trial)
        self.broadcast(trial)
        self.minimum(0)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        x = x.contiguous()
        if self.peers is not None and self.peers.takes(x):
            return self.peers.all_reduce(x)
        self._do("all_reduce", lambda backend: backend.allreduce([x], self._sum))
        return x

    def row_sums(self, size: int, dtype: torch.dtype) -> RowSums | None:
        """See RankGroup."""
        return None if self.peers is None else self.peers.row_sums(size, dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup."""
        gathered = x.new_empty(self.ranks * x.numel())
        flat = x.reshape(-1)
        self._do("all_gather", lambda backend: backend._allgather_base(gathered, flat, self._gather))
        return gathered.view(self.ranks, *x.shape)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See RankGroup; x is dense."""
        self._do("broadcast", lambda backend: backend.broadcast([x], self._from_first))
        return x

    def minimum(self, number: int) -> int:
        """See RankGroup."""
        held = torch.tensor([number], dtype=torch.int64, device=self._device)
        self._do("minimum", lambda backend: backend.allreduce([held], self._least))
        return int(held.item())

    def close(self) -> None:
        """See RankGroup. Not called while the device still works."""
        if self.peers is not None:
            self.peers.close()
            self.peers = None
        backend, self._backend = self._backend, None
        if backend is not None and self._device.type == "cuda":
            backend.shutdown()

    def _do(self, operation: str, launch: Callable[[_Backend], Any]) -> None:
        with _Attributed(self.rank, self.ranks, operation):
            if self._backend is None:
                raise ExecutorError(f"rank {self.rank} of {self.ranks} has left the others; {operation} cannot be done")
            work = launch(self._backend)
            if work is not None:
                work.wait()  # on a GPU the stream waits, not the host


class _Backend(Protocol):
    """What is used of torch's process groups."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any: ...

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Any: ...

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any: ...

    def shutdown(self) -> None: ...


class _Attributed:
    """Turns torch's errors into one that names rank and operation."""

    def __init__(self, rank: int, ranks: int, operation: str) -> None:
        self._rank = rank
        self._ranks = ranks
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise ExecutorError(
                f"rank {self._rank} of {self._ranks}: {self._operation} failed: {error}; another rank may have stopped"
            ) from error


def _options(kind: Callable[[], Any]) -> Any:
    """Of one operation that is in order with the rest of the present stream, and not on a stream of its own."""
    options = kind()
    options.asyncOp = False
    return options


def _store(rendezvous: Rendezvous) -> Any:
    """What the ranks know of each other."""
    url = urlsplit(rendezvous.place)
    if url.scheme == "tcp" and url.hostname is not None and url.port is not None:
        timeout = timedelta(seconds=rendezvous.timeout)
        return _c10d.TCPStore(url.hostname, url.port, timeout=timeout, wait_for_workers=False)
    return _c10d.FileStore(rendezvous.place, rendezvous.ranks)


def _gloo(store: Any, rendezvous: Rendezvous, timeout: timedelta) -> Any:
    """Over the interface at which the other ranks reach this host."""
    gloo = _c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=rendezvous.host)]
    options._threads = 2
    options._timeout = timeout
    return gloo(_c10d.PrefixStore("gloo", store), rendezvous.rank, rendezvous.ranks, options)


def _nccl(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    nccl = _c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(_c10d.PrefixStore("nccl", store), rank, ranks, options)
