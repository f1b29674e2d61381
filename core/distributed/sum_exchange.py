"""All-reduces of two ranks that run next to computation: copies by the GPUs' copy engines, over NVLink.

An all-reduce kernel needs multiprocessors, which the GEMMs of a large prefill step all use; a copy engine needs none.
Each rank copies its addend whole into a receive buffer of the other, in a stream of its own, which for two ranks moves
as few bytes as any all-reduce. Then it sets a flag next to the buffer. The other rank's compute stream waits for the
flag, which occupies no multiprocessor either, and adds its own addend. Both ranks add the same two numbers with one
rounding, so that the sums are the same on both to the last bit.

Flags of a rank, in its own memory: `arrived` of a buffer is set by the other rank behind the data; `free` of a buffer
of the *other* rank is set by the other rank when it has read it, and lets this rank copy there again. Flags are 0 or 1,
and whoever waits for one clears it, so that the operations are the same in every step and CUDA graphs can hold them.

`arrived` is cleared before `free` is set, and the other rank sets it again only after that. Freeing needs no operation
of the compute stream: a copy starts behind an event of that stream, by which all buffers that were read before are
free. At most two exchanges are in progress, and there are four buffers, so that a copy never waits for a buffer for
long: the exchange that had it before ended before the last but one began.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from engine.core.distributed.overlapped_sums import ALIGNMENT, Allocate, OverlappedSums, first_rows, round_up
from engine.core.distributed.partial_sum import USED_TWICE, ReceivedSum, sum_addends
from engine.core.distributed.stream_operations import WAIT, WRITE, batch, current_stream

if TYPE_CHECKING:
    from engine.core.distributed.rank_group import RankGroup

BUFFERS = 4
"""Receive buffers: for the two chunks of attention and the two of the MLP."""
MAX_IN_PROGRESS = 2
MIN_ROWS = 2048
"""Smaller sums are not split: two small GEMMs take longer than one, and the waits cost more than they hide."""


class ExchangedSum(ReceivedSum):
    """Rows of a partial sum whose exchange with the other rank has started."""

    __slots__ = ("_exchange", "_is_pending", "_sum", "slot")

    def __init__(
        self, addend: torch.Tensor, group: RankGroup, exchange: SumExchange | None = None, slot: int = 0
    ) -> None:
        """exchange: receives the other rank's addend, in its buffer number `slot`; None: the rank is alone, and its
        addend is the sum."""
        super().__init__(addend, group)
        self.slot = slot
        self._exchange = exchange
        self._is_pending = exchange is not None
        self._sum: torch.Tensor | None = None if self._is_pending else addend

    def receive(self) -> Sequence[torch.Tensor]:
        if self._sum is not None:
            return [self._sum]
        assert self._exchange is not None, "a rank that is alone has the sum"
        return self._exchange.receive(self)

    def release(self) -> None:
        self._is_pending = False
        if self._exchange is not None:
            self._exchange.release(self)

    def reduce(self) -> torch.Tensor:
        """The sum over both ranks, in the addend's memory. May be called again."""
        return self._add(self._addend)

    def settle(self) -> None:
        """Compute the sum now, in new memory, so that another exchange can start."""
        self._add(None)

    def _add(self, out: torch.Tensor | None) -> torch.Tensor:
        """The sum, computed in `out`, or new memory, if it is not there yet."""
        if self._sum is None:
            self._sum = sum_addends(self.receive(), out)
            self.release()
        return self._sum

    def withdraw(self) -> torch.Tensor:
        """This rank's addend, which then is part of another sum; instead of `reduce`."""
        if self._is_pending:
            self.receive()
            self.release()
        return self._addend


class SumExchange(OverlappedSums):
    """Exchanges the addends of two ranks."""

    min_rows = MIN_ROWS

    def _open(self, allocate: Allocate, device: torch.device) -> None:
        rows = first_rows(self.max_rows)
        row = self.size * self.dtype.itemsize
        self._nbytes = round_up(rows * row, ALIGNMENT)
        memory, addresses = allocate(BUFFERS * self._nbytes + ALIGNMENT)
        self.nbytes = memory.nbytes
        self._memory = memory
        self._received = [
            memory[index * self._nbytes :][: rows * row].view(self.dtype).view(rows, self.size)
            for index in range(BUFFERS)
        ]
        flags = memory[BUFFERS * self._nbytes :].view(torch.int32)
        flags.fill_(0)
        flags[BUFFERS : 2 * BUFFERS].fill_(1)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._group.minimum(0)  # a barrier: no rank sends before all flags are set
        own, other = addresses[self._group.rank], addresses[1 - self._group.rank]
        self._buffers = [other + index * self._nbytes for index in range(BUFFERS)]
        arrived, free = (BUFFERS * self._nbytes + 4 * BUFFERS * index for index in range(2))
        self._own_arrived = [own + arrived + 4 * index for index in range(BUFFERS)]
        self._other_arrived = [other + arrived + 4 * index for index in range(BUFFERS)]
        self._own_free = [own + free + 4 * index for index in range(BUFFERS)]
        self._other_free = [other + free + 4 * index for index in range(BUFFERS)]
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side = self._stream.cuda_stream
        self._ready = [self._driver.event() for _ in range(BUFFERS)]
        """Event per buffer: the compute stream has computed the addend."""
        self._sent = [self._driver.event() for _ in range(BUFFERS)]
        """Event per buffer: the addend is copied to the other rank."""
        self._all_read, self._all_freed = self._driver.event(), self._driver.event()
        """Events: the compute stream has read all buffers; they are free."""
        self._arrival = [batch([(WAIT, address, 1)]) for address in self._own_arrived]
        """Per buffer, operations that wait for the other rank's addend."""
        self._forget = [batch([(WRITE, address, 0)]) for address in self._own_arrived]
        """Per buffer, operations that clear the flag of an addend that was read."""
        self._take = [batch([(WAIT, address, 1), (WRITE, address, 0)]) for address in self._own_free]
        """Per buffer of the other rank, operations that wait until it is free, and take it."""
        self._announce = [batch([(WRITE, address, 1)]) for address in self._other_arrived]
        """Per buffer of the other rank, operations that set the flag of this rank's addend."""
        self._free_and_take = cache(self._free_and_take_operations)
        self._in_progress: list[ExchangedSum] = []
        self._read: list[int] = []
        """Buffers that have been read, but not freed yet."""
        self._next = 0

    def start(self, addend: torch.Tensor) -> ExchangedSum:
        """Send rows to the other rank: [rows, size], once the current stream has computed them."""
        if self.is_alone:
            return ExchangedSum(addend, self._group)
        if len(self._in_progress) == MAX_IN_PROGRESS:
            self._in_progress[0].settle()
        addend = addend.contiguous()
        slot, self._next = self._next, (self._next + 1) % BUFFERS
        driver, side, ready = self._driver, self._side, self._ready[slot]
        nbytes = addend.nbytes
        failed = driver.record(ready, current_stream(self._index)) or driver.wait_event(side, ready, 0)
        if torch.cuda.is_current_stream_capturing():
            failed = (
                failed
                or self._free_captured()
                or self._run(side, self._take[slot])
                or driver.copy(self._buffers[slot], addend.data_ptr(), nbytes, side)
                or self._set_captured(self._other_arrived[slot])
            )
        else:
            failed = (
                failed
                or self._run(side, self._free_and_take(slot, tuple(self._read)))
                or driver.copy(self._buffers[slot], addend.data_ptr(), nbytes, side)
                or self._run(side, self._announce[slot])
            )
            self._read.clear()
        self._check(failed or driver.record(self._sent[slot], side))
        started = ExchangedSum(addend, self._group, self, slot)
        self._in_progress.append(started)
        return started

    def receive(self, started: ExchangedSum) -> list[torch.Tensor]:
        """Wait for the other rank's addend, and return both. Sums that were started before are computed first."""
        if started not in self._in_progress:
            raise RuntimeError(USED_TWICE)
        while self._in_progress[0] is not started:
            self._in_progress[0].settle()
        slot, stream = started.slot, current_stream(self._index)
        # The copy to the other rank must end before the addend's memory changes. First, so that the wait for the other
        # rank cannot hold up what the other rank waits for, should both streams share a queue of the device.
        self._check(self._driver.wait_event(stream, self._sent[slot], 0) or self._run(stream, self._arrival[slot]))
        return [started.addend, self._received[slot][: len(started.addend)]]

    def release(self, received: ExchangedSum) -> None:
        """Let the other rank overwrite a receive buffer, once the current stream has read it."""
        del self._in_progress[0]
        self._read.append(received.slot)
        if not self._in_progress:
            self._end(current_stream(self._index))

    def _end(self, stream: int) -> None:
        """Free all buffers, since the next exchange may be that of a CUDA graph, which frees its own only."""
        driver, side = self._driver, self._side
        self._next = 0
        failed = driver.record(self._all_read, stream) or driver.wait_event(side, self._all_read, 0)
        if torch.cuda.is_current_stream_capturing():
            failed = (
                failed
                or self._free_captured()
                or driver.record(self._all_freed, side)
                or driver.wait_event(stream, self._all_freed, 0)  # a capture ends with the stream that it began with
            )
        else:
            failed = failed or self._run(side, self._free_and_take(None, tuple(self._read)))
            self._read.clear()
        self._check(failed)

    def _free_and_take_operations(self, slot: int | None, read: tuple[int, ...]) -> Any:
        """Operations that let the other rank copy again to the buffers in `read`, and wait for its buffer `slot`."""
        operations = [
            one for each in read for one in ((WRITE, self._own_arrived[each], 0), (WRITE, self._other_free[each], 1))
        ]
        if slot is not None:
            operations += [(WAIT, self._own_free[slot], 1), (WRITE, self._own_free[slot], 0)]
        return batch(operations)

    def _free_captured(self) -> int:
        """Let the other rank copy again to the buffers that were read, by operations that a graph can hold."""
        failed = 0
        for slot in self._read:
            failed = failed or self._run(self._side, self._forget[slot]) or self._set_captured(self._other_free[slot])
        self._read.clear()
        return failed

    def _set_captured(self, flag: int) -> int:
        """Set a flag of the other rank by a copy: as in NCCL, memory operations of a graph are on own memory."""
        return self._driver.copy(flag, self._one.data_ptr(), self._one.nbytes, self._side)
