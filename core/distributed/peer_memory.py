"""Sums over GPUs by kernels that read and write the other GPUs' memory, over NVLink.

NCCL takes some 10 to 20 microseconds for even the smallest sum; a decode step has two for every layer. Where all GPUs
can map each other's memory, small sums are done by torch's kernels on symmetric memory. One shot: each rank reads all
the others' numbers and adds them up. Two shots: each rank adds up its share and reads the other shares' sums, which
moves less when there is much to move or there are many ranks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup
    from engine.ops.norm.all_reduce_rms_norm import RowSums

log = logging.getLogger(__name__)

MOST_BYTES = 4 << 20
"""Of a sum by these kernels, and of the memory kept for it; NCCL does larger ones."""
ONE_SHOT_BYTES = {2: 1 << 20, 4: 256 << 10, 8: 128 << 10}
"""Ranks that torch has kernels for -> sums up to this size go in one shot."""
ROW_SUMS_BYTES = {2: 1 << 20, 4: 1 << 20, 8: 512 << 10}
"""The same of sums by `row_sums`, which save a kernel."""
MOST_ROWS = 128
"""Of such a sum: a GPU has room for as many programs at once."""
DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 16
"""Bytes; the kernels read whole vectors."""


class PeerMemory:
    """One rank's buffer, which the other ranks have mapped.

    It is free again when a sum is done: the kernels end on all ranks together.
    """

    def __init__(self, name: str, group: RankGroup, store: Any, device: torch.device) -> None:
        """name: no other group's; store: see `open`."""
        self._name = name
        c10d: Any = torch._C._distributed_c10d
        # Symmetric memory looks a group up by its name, for its ranks and its store; torch does not keep it alive.
        self._registered = c10d.ProcessGroup(store, group.rank, group.ranks)
        c10d._register_process_group(name, self._registered)
        self._group = group
        self._device = device
        self._mappings: list[Any] = []
        """Of the memory that the other ranks have."""
        self._buffer, _ = self._allocate(MOST_BYTES)
        self._views = {dtype: self._buffer.view(dtype) for dtype in DTYPES}
        self._one_shot_bytes = ONE_SHOT_BYTES[group.ranks]
        self._row_sums: dict[tuple[int, torch.dtype], tuple[RowSums, torch.Tensor]] = {}

    @classmethod
    def open(cls, group: RankGroup, store: Any) -> PeerMemory | None:
        """Called by all ranks. None, and a line in the log, where one of them cannot: sums are then NCCL's.

        store: of torch's, for these ranks alone.
        """
        if group.ranks not in ONE_SHOT_BYTES:
            return None
        opened, why = None, "another rank cannot"
        try:
            if group.rank == 0:
                store.set("name", uuid4().hex)
            name = store.get("name").decode()
            opened = cls(name, group, store, torch.device("cuda", torch.cuda.current_device()))
        except RuntimeError as error:  # what torch raises where memory cannot be mapped
            why = str(error).partition("\n")[0]
        if group.minimum(int(opened is not None)):
            return opened
        log.warning("rank %d: the GPUs' memory cannot be shared, so that small sums take longer: %s", group.rank, why)
        return None

    def row_sums(self, size: int, dtype: torch.dtype) -> RowSums:
        """See RankGroup; the same memory for the same rows, since no two sums are under way at once."""
        from engine.ops.norm.all_reduce_rms_norm import RowSums

        if (size, dtype) not in self._row_sums:
            rank, ranks = self._group.rank, self._group.ranks
            most = max(1, min(MOST_ROWS, ROW_SUMS_BYTES[ranks] // (size * dtype.itemsize)))
            flags = -(-2 * most * size * dtype.itemsize // ALIGNMENT) * ALIGNMENT  # where they begin, behind the rows
            buffer, addresses = self._allocate(flags + most * ranks * 4)
            buffer.zero_()
            torch.cuda.synchronize(self._device)
            self._group.minimum(0)  # no rank writes a flag before all are zero
            made = RowSums(
                rank=rank,
                ranks=ranks,
                size=size,
                most_rows=most,
                places=torch.tensor(addresses, device=self._device),
                flags=torch.tensor([address + flags for address in addresses], device=self._device),
                epochs=torch.zeros(most, dtype=torch.int32, device=self._device),
            )
            self._row_sums[size, dtype] = made, buffer
        return self._row_sums[size, dtype][0]

    def close(self) -> None:
        """Forget the group's name."""
        c10d: Any = torch._C._distributed_c10d
        c10d._unregister_process_group(self._name)

    def _allocate(self, nbytes: int) -> tuple[torch.Tensor, list[int]]:
        """Memory that all ranks can reach, and where each rank's is. Called by all ranks."""
        memory: Any = torch._C._distributed_c10d._SymmetricMemory
        buffer: torch.Tensor = memory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device, self._name)
        mapping = memory.rendezvous(buffer, self._name)
        self._mappings.append(mapping)
        return buffer, list(mapping.buffer_ptrs)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the sum of such a tensor is for these kernels: the same on all ranks, as it asks for nothing but
        type and size."""
        return 0 < x.nbytes <= MOST_BYTES and x.nbytes % ALIGNMENT == 0 and x.dtype in DTYPES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, which `takes` takes, in new memory."""
        ours = self._views[x.dtype][: x.numel()].view(x.shape)
        # torch's kernel that copies by itself lets other ranks read before all of its threads have written.
        ours.copy_(x)
        if x.nbytes <= self._one_shot_bytes:
            reduced: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(ours, "sum", self._name)
            return reduced
        total = torch.empty_like(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(ours, "sum", self._name, total)
        return total
