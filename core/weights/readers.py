"""A pool of threads that read weights, to a GPU through pinned memory and a stream per thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from attrs import frozen

from engine.core.host import Host

MAX_TASK_BYTES = 8 << 20
"""Largest ReadTask (8 MiB): large enough for full speed of disk and bus."""
MAX_THREADS = 8
"""More threads would not be faster: memory bandwidth is the limit."""


@frozen
class ReadTask:
    """Read a part of a tensor. Any thread can run it, in any order."""

    position: tuple[str, int]
    """File and offset. Tasks are started in this order."""
    target: torch.Tensor
    """Memory to fill: [bytes] uint8 on the device, at most MAX_TASK_BYTES."""
    read: Callable[[memoryview], None]
    """Fills CPU memory of the target's size."""


class ReaderPool:
    """Threads that read tensors of one device. Leaving its `with` block drops waiting tasks and ends the threads."""

    def __init__(self, device: str, threads: int) -> None:
        self._device = torch.device(device)
        self._local = threading.local()
        self._on_gpu = self._device.type == "cuda"
        self._pool = ThreadPoolExecutor(threads, "weights")
        self._inference = torch.is_inference_mode_enabled()

    def __enter__(self) -> ReaderPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)  # copies into tensors that no one waits for any more

    def submit(self, tasks: Iterable[ReadTask]) -> PendingReads:
        """Start reading. The tasks' targets must have been allocated on the current stream."""
        allocated = torch.cuda.current_stream(self._device).record_event() if self._on_gpu else None
        ordered = sorted(tasks, key=lambda task: task.position)
        return PendingReads([self._pool.submit(self._run, task, allocated) for task in ordered], self._device)

    def _run(self, task: ReadTask, allocated: torch.cuda.Event | None) -> torch.cuda.Event | None:
        if allocated is None:
            task.read(task.target.numpy().data)
            return None
        if not hasattr(self._local, "staging"):
            self._local.staging = Staging(self._device)
        staging: Staging = self._local.staging
        with torch.inference_mode(self._inference):
            return staging.read(task, allocated)


class PendingReads:
    """Submitted tasks, to wait for."""

    def __init__(self, futures: Sequence[Future[torch.cuda.Event | None]], device: torch.device) -> None:
        self._futures = futures
        self._device = device

    def wait(self) -> None:
        """Wait until all tasks have read. On a GPU, the current stream then waits for their copies.

        Raises the error of a task.
        """
        for future in self._futures:
            event = future.result()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)


class Staging:
    """Two pinned buffers of one thread: the thread reads into one while the other is copied to the GPU."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)  # per thread
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(MAX_TASK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def read(self, task: ReadTask, allocated: torch.cuda.Event) -> torch.cuda.Event:
        """Read into pinned memory and start the copy to the GPU. Returns the event of the copy's end.

        allocated: event after which no earlier work uses the target's memory.
        """
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        buffer = self._buffers[self._turn][: task.target.numel()]
        task.read(buffer.numpy().data)
        self._stream.wait_event(allocated)
        with torch.cuda.stream(self._stream):
            task.target.copy_(buffer, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        self._copied[self._turn] = copied
        return copied


def auto_threads() -> int:
    """The number of cores that this process may use, at most MAX_THREADS."""
    return min(MAX_THREADS, Host().cores())
