"""Threads that read weights: each fills pieces of tensors, on a GPU by way of pinned memory and a stream of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from attrs import frozen

CHUNK = 8 << 20
"""Most bytes of a piece (8 MiB): enough for a disk and a bus to run at full speed."""
MOST_THREADS = 8
"""With more, the memory's bandwidth is the limit."""


@frozen
class Piece:
    """A part of a tensor that any thread can read, in any order."""

    place: tuple[str, int]
    """File and offset: pieces are read in this order."""
    target: torch.Tensor
    """Where it belongs: [bytes] uint8 on the device, at most CHUNK."""
    read: Callable[[memoryview], None]
    """Fills memory of the target's size."""


class Readers:
    """A pool of threads for the tensors of one device. Leaving its `with` block ends them, and what they had to do."""

    def __init__(self, device: str, threads: int) -> None:
        self._device = torch.device(device)
        self._local = threading.local()
        self._on_gpu = self._device.type == "cuda"
        self._pool = ThreadPoolExecutor(threads, "weights")
        self._inference = torch.is_inference_mode_enabled()

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)  # copies into tensors that nobody may wait for any more

    def start(self, pieces: Iterable[Piece]) -> Reading:
        """Begin to read. The pieces' targets are allocated on the present stream."""
        allocated = torch.cuda.current_stream(self._device).record_event() if self._on_gpu else None
        ordered = sorted(pieces, key=lambda piece: piece.place)
        return Reading([self._pool.submit(self._run, piece, allocated) for piece in ordered], self._device)

    def _run(self, piece: Piece, allocated: torch.cuda.Event | None) -> torch.cuda.Event | None:
        if allocated is None:
            piece.read(piece.target.numpy().data)
            return None
        if not hasattr(self._local, "staging"):
            self._local.staging = Staging(self._device)
        staging: Staging = self._local.staging
        with torch.inference_mode(self._inference):
            return staging.put(piece, allocated)


class Reading:
    """Pieces under way."""

    def __init__(self, futures: Sequence[Future[torch.cuda.Event | None]], device: torch.device) -> None:
        self._futures = futures
        self._device = device

    def wait(self) -> None:
        """Until all is read; on a GPU, work launched on the present stream from now on finds it there.

        Raises what reading raised.
        """
        for future in self._futures:
            event = future.result()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)


class Staging:
    """One thread's way to a GPU: two pieces of pinned memory, so that one is read while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # a setting of the thread
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def put(self, piece: Piece, allocated: torch.cuda.Event) -> torch.cuda.Event:
        """Read a piece and begin to copy it; the event is its end.

        allocated: after it, nothing launched earlier uses the memory that the target now has.
        """
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        memory = self._memory[self._turn][: piece.target.numel()]
        piece.read(memory.numpy().data)
        self._stream.wait_event(allocated)
        with torch.cuda.stream(self._stream):
            piece.target.copy_(memory, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        self._copied[self._turn] = copied
        return copied


def auto_threads() -> int:
    """As many as there are processors that this process may use, up to MOST_THREADS."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, processors)
