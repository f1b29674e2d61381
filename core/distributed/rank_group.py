"""The collectives of the ranks that share one model: all-reduce, all-gather, broadcast.

Every rank must call the same operations in the same order, with tensors of the same shapes. They do, since all of these
follow from the steps, which are the same on all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import torch

from engine.core.distributed.rendezvous import Rendezvous
from engine.core.errors import ExecutorError

if TYPE_CHECKING:
    from engine.core.device import DeviceInfo
    from engine.core.distributed.overlapped_sums import OverlappedSums
    from engine.core.distributed.peer_memory import PeerMemory
    from engine.ops.norm.all_reduce_rms_norm import ReduceBuffers

_c10d: Any = torch._C._distributed_c10d  # torch.distributed has neither the options nor types


class RankGroup(ABC):
    """One rank's member of the group of ranks that share a model. Passed to layers; never looked up.

    Operations on a GPU's tensors are launched in the current stream. Each may be captured in a CUDA graph after it has
    run outside of one.
    """

    rank: int
    ranks: int
    overlapped_sums: OverlappedSums | None = None
    """Computes sums of many rows next to computation; None: not possible, or `open_overlapped_sums` was not called."""

    def open_overlapped_sums(  # noqa: B027  (a default)
        self, max_rows: int, size: int, dtype: torch.dtype
    ) -> None:
        """Allocate memory for `overlapped_sums`, for sums of up to `max_rows` rows of `size` numbers, where possible.

        Called by all ranks, with the same arguments, before layers are made.
        """

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, the same on all ranks to the last bit. May overwrite x and return it."""

    def reduce_buffers(self, size: int, dtype: torch.dtype) -> ReduceBuffers | None:
        """Memory in which a kernel of the caller reduces a few rows of `size` numbers. None: use `all_reduce`.

        Called by all ranks, with the same arguments.
        """
        return None

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x: [ranks, *x.shape]."""

    @abstractmethod
    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite x with rank 0's x and return it."""

    @abstractmethod
    def minimum(self, number: int) -> int:
        """The smallest of all ranks' numbers. Waits for all ranks."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have operations in the `with` block use this rank's tensors alone: the other ranks call none.

        The result of `all_gather` may be arbitrary.
        """
        yield

    @abstractmethod
    def close(self) -> None:
        """Leave the group; a second call does nothing."""


class OneRank(RankGroup):
    """The only rank of its model."""

    rank = 0
    ranks = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def minimum(self, number: int) -> int:
        return number

    def close(self) -> None:
        pass


def join(rendezvous: Rendezvous, device: DeviceInfo) -> RankGroup:
    """Join the other ranks, by gloo on CPUs and by NCCL on GPUs. Waits for all of them.

    The group is independent of torch's global process groups. Raises ExecutorError, naming the rank, if the others do
    not join in time.
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
    """Ranks joined by a process group of torch (gloo or NCCL)."""

    def __init__(self, rank: int, ranks: int, backend: _Backend, device: torch.device) -> None:
        """Runs each operation once: the first call makes connections and allocates memory."""
        self.rank = rank
        self.ranks = ranks
        self.peers: PeerMemory | None = None
        """Does the all-reduces that it supports, in place of the backend."""
        self._backend: _Backend | None = backend
        self._device = device
        self._is_alone = False
        self._sum, self._min = _options(_c10d.AllreduceOptions), _options(_c10d.AllreduceOptions)
        self._min.reduceOp = _c10d.ReduceOp.MIN
        self._gather = _options(_c10d.AllgatherOptions)
        self._from_first = _options(_c10d.BroadcastOptions)
        self._from_first.rootRank = 0
        trial = torch.ones(1, device=device)
        self.all_reduce(trial)
        self.all_gather(trial)
        self.broadcast(trial)
        self.minimum(0)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self.peers is not None and not self._is_alone and self.peers.supports(x):
            return self.peers.all_reduce(x)
        self._do("all_reduce", lambda backend: backend.allreduce([x], self._sum))
        return x

    def reduce_buffers(self, size: int, dtype: torch.dtype) -> ReduceBuffers | None:
        return None if self.peers is None else self.peers.reduce_buffers(size, dtype)

    def open_overlapped_sums(self, max_rows: int, size: int, dtype: torch.dtype) -> None:
        if self.peers is not None:
            self.overlapped_sums = self.peers.overlapped_sums(max_rows, size, dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(self.ranks * x.numel())
        flat = x.reshape(-1)
        self._do("all_gather", lambda backend: backend._allgather_base(gathered, flat, self._gather))
        return gathered.view(self.ranks, *x.shape)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite x, which must be dense, with rank 0's x and return it."""
        self._do("broadcast", lambda backend: backend.broadcast([x], self._from_first))
        return x

    def minimum(self, number: int) -> int:
        held = torch.tensor([number], dtype=torch.int64, device=self._device)
        self._do("minimum", lambda backend: backend.allreduce([held], self._min))
        return int(held.item())

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._is_alone = True
        if self.overlapped_sums is not None:
            self.overlapped_sums.is_alone = True
        try:
            yield
        finally:
            self._is_alone = False
            if self.overlapped_sums is not None:
                self.overlapped_sums.is_alone = False

    def close(self) -> None:
        """Leave the group. Must not be called while work is in progress on the device."""
        if self.peers is not None:
            self.peers.close()
            self.peers = self.overlapped_sums = None
        backend, self._backend = self._backend, None
        if backend is not None and self._device.type == "cuda":
            backend.shutdown()

    def _do(self, operation: str, launch: Callable[[_Backend], Any]) -> None:
        if self._is_alone:
            return
        with _Attributed(self.rank, self.ranks, operation):
            if self._backend is None:
                raise ExecutorError(f"rank {self.rank} of {self.ranks} has left the others; {operation} cannot be done")
            work = launch(self._backend)
            if work is not None:
                work.wait()  # on a GPU the stream waits, not the host


class _Backend(Protocol):
    """The methods used of torch's process groups."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any: ...

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Any: ...

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any: ...

    def shutdown(self) -> None: ...


class _Attributed:
    """Context manager that turns torch's errors into an ExecutorError naming rank and operation."""

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
    """Options of one operation, which runs in the current stream in order, not in a stream of its own."""
    options = kind()
    options.asyncOp = False
    return options


def _store(rendezvous: Rendezvous) -> Any:
    """The key-value store through which the ranks find each other."""
    url = urlsplit(rendezvous.place)
    if url.scheme == "tcp" and url.hostname is not None and url.port is not None:
        timeout = timedelta(seconds=rendezvous.timeout)
        return _c10d.TCPStore(url.hostname, url.port, timeout=timeout, wait_for_workers=False)
    return _c10d.FileStore(rendezvous.place, rendezvous.ranks)


def _gloo(store: Any, rendezvous: Rendezvous, timeout: timedelta) -> Any:
    """A gloo backend on the network interface at which other ranks reach this host."""
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
