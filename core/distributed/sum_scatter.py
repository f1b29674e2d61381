"""All-reduces of several ranks that run next to computation, with a norm in their middle: reduce-scatter, norm,
all-gather, by copies of the GPUs' copy engines over NVLink.

A sum comes in two chunks of rows, and each chunk has one part of its rows per rank, which owns it. Each rank copies
part p of its addend to rank p, which adds the addends of its part, adds the residual, of which it alone has these rows,
norms the sum, quantizes the norm if the next linear layer wants that, and copies the result to the other ranks. That is
half as many bytes for four ranks as if each copied its whole addend to all others, less if the norm is quantized, and
each rank norms a part of the rows only. The owner computes each row once, so that all ranks have the same result to the
last bit.

Three kinds of streams: the compute stream computes addends and waits for the norm of all rows; the norm's stream, of
high priority, waits for the addends and norms them, next to the other chunk's computation; and a stream of copies. The
copies of the second chunk's addend start behind those of the first chunk's norm, which is needed first.

Flags are in the memory of the rank that waits for them: per chunk and other rank one that its addend has arrived, and
one that its norm has. They are 0 or 1, and whoever waits for one clears it, so that the operations are the same in
every step and CUDA graphs can hold them. No flag says that memory is free: a rank sends the next addend of a chunk
behind a wait for all norms of the chunk's last sum, which their owners computed from all addends; and it sends the next
norm of a chunk when all addends for it have arrived, which the other ranks sent behind whatever read the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch

from engine.core.distributed.overlapped_sums import ALIGNMENT, Allocate, OverlappedSums, first_rows, round_up
from engine.core.distributed.partial_sum import USED_TWICE
from engine.core.distributed.scattered_rows import part_rows
from engine.core.distributed.scattered_sum import OwnRows, ScatteredSum
from engine.core.distributed.stream_operations import WAIT, WRITE, batch, current_stream
from engine.core.distributed.sum_exchange import ExchangedSum
from engine.core.errors import ExecutorError

MAX_RANKS = 4
"""The norm's kernels add up to this many addends."""
SLOTS = 2
"""Sums in progress: one per chunk."""
MIN_ROWS = 4096
"""Smaller sums are not split: the waits and the gaps between copies cost more than they hide."""
ROOM_ROWS = 256
"""Memory of norms is a multiple of this many rows, since GEMMs load whole tiles."""
ADDEND, NORM = 0, 1
"""Kinds of flags: that an addend has arrived, and that a norm has."""


class SumScatter(OverlappedSums):
    """Sums the addends of 2 to MAX_RANKS ranks by parts of rows."""

    min_rows = MIN_ROWS

    def _open(self, allocate: Allocate, device: torch.device) -> None:
        driver, rank, ranks = self._driver, self._group.rank, self._group.ranks
        self._others = [(rank + step) % ranks for step in range(1, ranks)]
        """In the order of copies: at any time, each rank receives from another one."""
        rows, row = first_rows(self.max_rows), self.size * self.dtype.itemsize
        part = round_up(part_rows(rows, ranks) * row, ALIGNMENT)
        self._addend_bytes = part
        self._norm_bytes = round_up(rows, ROOM_ROWS) * row + 4 * ALIGNMENT
        self._norms_at = SLOTS * (ranks - 1) * part
        flags_at = self._norms_at + SLOTS * self._norm_bytes
        memory, addresses = allocate(flags_at + ALIGNMENT)
        self.nbytes = memory.nbytes
        self._memory = memory
        memory[flags_at:].view(torch.int32).fill_(0)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._group.minimum(0)  # a barrier: no rank sends before all flags are cleared
        self._addresses = addresses
        self._flags_at = flags_at
        self._norm_stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._side = self._norm_stream.cuda_stream
        self._copy_stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = self._copy_stream.cuda_stream
        self._ready = [driver.event() for _ in range(SLOTS)]
        """Event per slot: the compute stream has computed the addend."""
        self._normed = [driver.event() for _ in range(SLOTS)]
        """Event per slot: the norm's stream has computed this rank's rows of the norm."""
        self._own = [driver.event() for _ in range(SLOTS)]
        """Event per slot: these rows are copied into this rank's own memory."""
        self._sent = [driver.event() for _ in range(SLOTS)]
        """Event per slot: they are copied to the other ranks."""
        self._read = driver.event()
        """Event: the current stream has done what a norm must wait for (`order_norm_behind_current_stream`)."""
        self._wait_flags = [[self._waits(slot, kind) for kind in (ADDEND, NORM)] for slot in range(SLOTS)]
        self._set_flags = [[self._sets(slot, kind) for kind in (ADDEND, NORM)] for slot in range(SLOTS)]
        self._in_progress: list[ScatteredSum] = []
        self._kept: list[Any] = [None] * SLOTS
        """What the copies of a slot read, until they have ended."""

    def _flag(self, at: int, slot: int, kind: int, source: int) -> int:
        """Address of a flag in rank `at`'s memory. kind: ADDEND or NORM."""
        return self._addresses[at] + self._flags_at + 4 * ((slot * 2 + kind) * self._group.ranks + source)

    def _waits(self, slot: int, kind: int) -> Any:
        """Operations that wait for the flags of all other ranks, and clear them."""
        own = self._group.rank
        flags = [self._flag(own, slot, kind, other) for other in self._others]
        return batch([(WAIT, flag, 1) for flag in flags] + [(WRITE, flag, 0) for flag in flags])

    def _sets(self, slot: int, kind: int) -> Any:
        """Operations that set this rank's flag in the memory of each other rank."""
        return batch([(WRITE, self._flag(other, slot, kind, self._group.rank), 1) for other in self._others])

    def _addend_at(self, slot: int, owner: int, source: int) -> int:
        """Offset of the memory in which `owner` receives the addend of `source`."""
        ranks = self._group.ranks
        return (slot * (ranks - 1) + (source - owner - 1) % ranks) * self._addend_bytes

    def norm_stream(self) -> AbstractContextManager[Any]:
        """Launches in the stream of norms."""
        return torch.cuda.stream(self._norm_stream)

    def start(self, addend: torch.Tensor) -> ScatteredSum | ExchangedSum:
        """Have rows summed: [rows, size], once the current stream has computed them."""
        if self.is_alone:
            return ExchangedSum(addend, self._group)
        if len(self._in_progress) == SLOTS:
            self._in_progress[0].settle()
        slot = min(set(range(SLOTS)) - {one.slot for one in self._in_progress})
        started = ScatteredSum(addend.contiguous(), self._group, self, slot)
        self._check(self._driver.record(self._ready[slot], current_stream(self._index)))
        self._in_progress.append(started)
        # The second chunk's addend would delay the first chunk's norm, for which the compute stream waits first.
        if all(one.gathered is not None for one in self._in_progress[:-1]):
            self._send(started)
        return started

    def _send(self, started: ScatteredSum) -> None:
        """Copy the parts of an addend to their owners."""
        started.is_sent = True
        driver, slot, addend, group = self._driver, started.slot, started.addend, self._group
        part, row = part_rows(len(addend), group.ranks), self.size * self.dtype.itemsize
        failed = driver.wait_event(self._copies, self._ready[slot], 0)
        for other in self._others:
            begin = min(other * part, len(addend))
            count = min(part, len(addend) - begin)
            target = self._addresses[other] + self._addend_at(slot, other, group.rank)
            failed = failed or self._copy(target, addend.data_ptr() + begin * row, count * row, self._copies)
        self._check(failed or self._set(slot, ADDEND))

    def receive(self, started: ScatteredSum) -> OwnRows:
        """Wait for the other ranks' addends of this rank's rows, and return those of all ranks."""
        if started.gathered is not None or started not in self._in_progress:
            raise RuntimeError(USED_TWICE)  # instead of a wait for addends that no rank sends again
        driver, slot, addend, group = self._driver, started.slot, started.addend, self._group
        self._check(driver.wait_event(self._side, self._ready[slot], 0))
        if not started.is_sent:
            self._send(started)
        self._check(self._run(self._side, self._wait_flags[slot][ADDEND]))
        count = started.end - started.begin
        addends = []
        for source in range(group.ranks):
            if source == group.rank:
                addends.append(addend[started.begin : started.end])
                continue
            begin = self._addend_at(slot, group.rank, source)
            memory = self._memory[begin : begin + count * self.size * self.dtype.itemsize]
            addends.append(memory.view(self.dtype).view(count, self.size))
        return OwnRows(addend, group, addends)

    def order_norm_behind_current_stream(self) -> None:
        """Have the next norm wait for what is launched in the current stream."""
        stream = current_stream(self._index)
        self._check(self._driver.record(self._read, stream) or self._driver.wait_event(self._side, self._read, 0))

    def gather(self, started: ScatteredSum, made: Sequence[torch.Tensor]) -> None:
        """Send this rank's rows of a norm to all ranks, and the addends that wait behind them."""
        self._kept[started.slot] = made = [one.contiguous() for one in made]
        offsets, gathered = self._place_norm(started, made)
        self._send_norm(started.slot, offsets, made)
        started.gathered = gathered
        for waiting in self._in_progress:
            if not waiting.is_sent:
                self._send(waiting)

    def _place_norm(self, started: ScatteredSum, made: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
        """Divide the slot's memory of norms among tensors of which `made` are this rank's rows.

        Returns the offset of these rows, which is the same on all ranks, and a view of all rows, of each tensor. Raises
        ExecutorError for a tensor of another number of rows, or if the memory is too small.
        """
        rank, rows, own = self._group.rank, len(started.addend), started.end - started.begin
        at = self._norms_at + started.slot * self._norm_bytes
        end = at + self._norm_bytes
        offsets, gathered = [], []
        for one in made:
            if len(one) != own:
                raise ExecutorError(
                    f"rank {rank} has {own} rows of a sum, but its norm has a tensor of {len(one)} rows"
                )
            row = prod(one.shape[1:]) * one.itemsize
            if at + rows * row > end:
                raise ExecutorError(
                    f"a norm of {rows} rows of {row} bytes does not fit rank {rank}'s memory for {self._norm_bytes}"
                    " bytes; use --overlap-sums off"
                )
            offsets.append(at + started.begin * row)
            gathered.append(self._memory[at : at + rows * row].view(one.dtype).view(rows, *one.shape[1:]))
            at = round_up(at + round_up(rows, ROOM_ROWS) * row, ALIGNMENT)
        return offsets, gathered

    def _send_norm(self, slot: int, offsets: Sequence[int], made: Sequence[torch.Tensor]) -> None:
        """Copy this rank's rows of a norm to their offsets in all ranks' memory, and set the other ranks' flags."""
        driver = self._driver
        failed = driver.record(self._normed[slot], self._side)
        own = self._addresses[self._group.rank]
        for offset, one in zip(offsets, made, strict=True):
            failed = failed or self._copy(own + offset, one.data_ptr(), one.nbytes, self._side)
        failed = failed or driver.record(self._own[slot], self._side)
        failed = failed or driver.wait_event(self._copies, self._normed[slot], 0)
        for other in self._others:
            for offset, one in zip(offsets, made, strict=True):
                target = self._addresses[other] + offset
                failed = failed or self._copy(target, one.data_ptr(), one.nbytes, self._copies)
        self._check(failed or self._set(slot, NORM) or driver.record(self._sent[slot], self._copies))

    def finish(self, started: ScatteredSum) -> list[torch.Tensor]:
        """Wait for all ranks' rows of a norm, and return them; the sum is then no longer in progress."""
        assert started.gathered is not None, "finish() comes behind gather()"
        driver, slot, stream = self._driver, started.slot, current_stream(self._index)
        # Behind the copies the addend's memory may change, and a capture ends with the stream that it began with.
        failed = driver.wait_event(stream, self._own[slot], 0) or driver.wait_event(stream, self._sent[slot], 0)
        self._check(failed or self._run(stream, self._wait_flags[slot][NORM]))
        self._in_progress.remove(started)
        return started.gathered

    def _set(self, slot: int, kind: int) -> int:
        """Set this rank's flag on the other ranks, behind the copies."""
        if not torch.cuda.is_current_stream_capturing():
            return self._run(self._copies, self._set_flags[slot][kind])
        failed = 0
        for other in self._others:  # by copies: memory operations of a graph are on own memory
            flag = self._flag(other, slot, kind, self._group.rank)
            failed = failed or self._copy(flag, self._one.data_ptr(), self._one.nbytes, self._copies)
        return failed

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        return self._driver.copy(target, source, nbytes, stream) if nbytes else 0
