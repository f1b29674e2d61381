"""All-reduces over GPUs by kernels that read and write the other GPUs' memory, over NVLink.

NCCL takes 10 to 20 microseconds for even the smallest all-reduce, and a decode step has two per layer. Where all GPUs
can map each other's memory, a norm's kernel reduces its input (ops/norm/all_reduce_rms_norm.py), and torch's kernels on
symmetric memory do the other small all-reduces. One shot: each rank sums the tensors of all ranks. Two shots: each rank
sums one shard, then all ranks get the sums of the other shards. With more than two ranks that moves fewer bytes, but in
two trips over NVLink, so only large tensors take two shots.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

if TYPE_CHECKING:
    from engine.core.distributed.overlapped_sums import OverlappedSums
    from engine.core.distributed.rank_group import RankGroup
    from engine.ops.norm.all_reduce_rms_norm import ReduceBuffers

log = logging.getLogger(__name__)

MAX_BYTES = 4 << 20
"""Largest tensor that torch's kernels reduce, and size of the memory kept for them; NCCL reduces larger ones."""
ONE_SHOT_BYTES = {2: 1 << 20, 4: 256 << 10, 8: 128 << 10}
"""Number of ranks -> largest tensor that torch reduces in one shot. It has kernels for these numbers of ranks only."""
NORM_MAX_BYTES = 8 << 20
"""Largest tensor that a norm's kernel reduces (`reduce_buffers`). Each GPU keeps at most 2 * ranks times as many bytes
per dtype and row size."""
NORM_MAX_ROWS = 1024
"""Maximum number of rows of such a tensor."""
NORM_ONE_SHOT_BYTES = {2: 2 << 20, 4: 192 << 10, 8: 64 << 10}
"""Number of ranks -> largest tensor that a norm's kernel reduces in one shot. Measured for 2 and 4 ranks and rows of
4096 bfloat16 numbers."""
DTYPES = (torch.float32, torch.bfloat16)
WORD = 4
"""Bytes: rows reduced within a norm's kernel are whole words."""
ALIGNMENT = 16
"""Bytes: the kernels read whole vectors."""


class PeerMemory:
    """One rank's buffer, which the other ranks have mapped.

    An all-reduce leaves the buffer free for the next one: its kernels end on all ranks together.
    """

    def __init__(self, name: str, group: RankGroup, store: Any, device: torch.device) -> None:
        """name: unique to this group; store: see `open`. Raises RuntimeError where memory cannot be mapped."""
        self._name = name
        c10d: Any = torch._C._distributed_c10d
        # Symmetric memory looks up the group's ranks and store by its name; torch does not keep the group alive.
        self._registered = c10d.ProcessGroup(store, group.rank, group.ranks)
        c10d._register_process_group(name, self._registered)
        self._group = group
        self._device = device
        self._mappings: list[Any] = []
        """Mappings of the other ranks' memory, kept alive here."""
        try:
            self._buffer, _ = self._allocate(MAX_BYTES)
        except BaseException:
            self.close()
            raise
        self._views = {dtype: self._buffer.view(dtype) for dtype in DTYPES}
        self._one_shot_bytes = ONE_SHOT_BYTES[group.ranks]
        self._reduce_buffers: dict[tuple[int, torch.dtype], tuple[ReduceBuffers, torch.Tensor]] = {}

    @classmethod
    def open(cls, group: RankGroup, store: Any) -> PeerMemory | None:
        """Map the ranks' memory. Called by all ranks. None if a rank cannot, which is logged; NCCL then reduces.

        store: a torch store for these ranks alone.
        """
        if group.ranks not in ONE_SHOT_BYTES:
            return None
        opened, why = None, "another rank cannot"
        try:
            if group.rank == 0:
                store.set("name", uuid4().hex)
            name = store.get("name").decode()
            opened = cls(name, group, store, torch.device("cuda", torch.cuda.current_device()))
        except RuntimeError as error:  # torch raises this where memory cannot be mapped
            why = str(error).partition("\n")[0]
        if group.minimum(int(opened is not None)):
            return opened
        if opened is not None:
            opened.close()
        log.warning(
            "rank %d: the GPUs' memory cannot be shared, so that small all-reduces take longer: %s", group.rank, why
        )
        return None

    def reduce_buffers(self, size: int, dtype: torch.dtype) -> ReduceBuffers | None:
        """Memory for the reductions within norms (RankGroup.reduce_buffers). Calls with the same arguments share it, as
        all-reduces follow each other."""
        if size * dtype.itemsize % WORD or size * dtype.itemsize > NORM_MAX_BYTES:
            return None
        from engine.ops.common.polling import EMPTY
        from engine.ops.norm.all_reduce_rms_norm import ReduceBuffers

        if (size, dtype) not in self._reduce_buffers:
            rank, ranks, row = self._group.rank, self._group.ranks, size * dtype.itemsize
            max_rows = min(NORM_MAX_ROWS, NORM_MAX_BYTES // row)
            memory, addresses = self._allocate(2 * max_rows * ranks * row)
            memory.view(torch.int32).fill_(EMPTY.value)
            torch.cuda.synchronize(self._device)
            self._group.minimum(0)  # a barrier: no rank sends a message before all memory is EMPTY
            buffers = ReduceBuffers(
                rank=rank,
                ranks=ranks,
                size=size,
                max_rows=max_rows,
                one_shot_rows=NORM_ONE_SHOT_BYTES[ranks] // row,
                messages=torch.tensor(addresses, device=self._device),
                epochs=torch.zeros(max_rows, dtype=torch.int32, device=self._device),
            )
            self._reduce_buffers[size, dtype] = buffers, memory
        return self._reduce_buffers[size, dtype][0]

    def overlapped_sums(self, max_rows: int, size: int, dtype: torch.dtype) -> OverlappedSums | None:
        """An object that computes sums of many rows next to computation. None: there are too many ranks or too few
        rows, or a rank's driver lacks functions that this needs."""
        from engine.core.distributed.stream_operations import Driver
        from engine.core.distributed.sum_exchange import SumExchange
        from engine.core.distributed.sum_scatter import MAX_RANKS, MIN_ROWS, SumScatter

        if self._group.ranks > MAX_RANKS or size * dtype.itemsize % ALIGNMENT:
            return None
        if self._group.ranks > 2 and max_rows < MIN_ROWS:
            return None
        driver = Driver.find(self._device)
        if not self._group.minimum(int(driver is not None)) or driver is None:
            return None
        sizes: dict[str, Any] = {"max_rows": max_rows, "size": size, "dtype": dtype}
        # Two ranks exchange whole addends, which moves as few bytes, in one trip.
        made = SumExchange if self._group.ranks == 2 else SumScatter
        return made(driver, self._group, self._allocate, self._device, **sizes)

    def close(self) -> None:
        """Unregister the group's name."""
        c10d: Any = torch._C._distributed_c10d
        c10d._unregister_process_group(self._name)

    def _allocate(self, nbytes: int) -> tuple[torch.Tensor, list[int]]:
        """Memory that all ranks can reach, and the address of each rank's. Called by all ranks."""
        memory: Any = torch._C._distributed_c10d._SymmetricMemory
        buffer: torch.Tensor = memory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device, self._name)
        mapping = memory.rendezvous(buffer, self._name)
        self._mappings.append(mapping)
        return buffer, list(mapping.buffer_ptrs)

    def supports(self, x: torch.Tensor) -> bool:
        """Whether these kernels reduce a tensor of this dtype and size. All ranks come to the same answer."""
        return 0 < x.nbytes <= MAX_BYTES and x.nbytes % ALIGNMENT == 0 and x.dtype in DTYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, which `supports` accepts, in new memory."""
        ours = self._views[x.dtype][: x.numel()].view(x.shape)
        # Copied here: torch's kernel that also copies lets other ranks read before all of its threads have written.
        ours.copy_(x)
        if x.nbytes <= self._one_shot_bytes:
            reduced: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(ours, "sum", self._name)
            return reduced
        total = torch.empty_like(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(ours, "sum", self._name, total)
        return total
