from __future__ import annotations

import threading

import pytest
import torch

from engine.core.weights.readers import MAX_THREADS, ReaderPool, ReadTask, auto_threads


def test_tasks_are_started_in_the_order_of_the_file() -> None:
    started: list[tuple[str, int]] = []

    def task(file: str, offset: int) -> ReadTask:
        def read(memory: memoryview) -> None:
            started.append((file, offset))

        return ReadTask((file, offset), torch.empty(1, dtype=torch.uint8), read)

    with ReaderPool("cpu", 1) as readers:
        readers.submit([task("b", 0), task("a", 9), task("a", 3)]).wait()
    assert started == [("a", 3), ("a", 9), ("b", 0)]


def test_threads_read_in_parallel() -> None:
    both = threading.Barrier(2, timeout=10)
    target = torch.empty(2, 4, dtype=torch.uint8)

    def read(memory: memoryview) -> None:
        both.wait()
        memory[:] = b"\7" * 4

    with ReaderPool("cpu", 2) as readers:
        readers.submit(ReadTask(("a", row), target[row], read) for row in range(2)).wait()
    assert target.tolist() == [[7] * 4] * 2


def test_waiting_tasks_are_dropped_after_an_error() -> None:
    read: list[int] = []

    def fail(memory: memoryview) -> None:
        raise OSError("no such block")

    def work(memory: memoryview) -> None:
        read.append(1)

    target = torch.empty(1, dtype=torch.uint8)
    first = threading.Event()

    def wait(memory: memoryview) -> None:
        first.wait(10)

    def fail_while_others_wait() -> None:
        with ReaderPool("cpu", 1) as readers:
            failing = readers.submit([ReadTask(("a", 0), target, fail)])
            readers.submit([ReadTask(("a", 1), target, wait)])
            waiting = readers.submit([ReadTask(("a", 2), target, work) for _ in range(50)])
            waiting._futures[-1].add_done_callback(lambda _: first.set())  # once it is dropped, the last of all
            failing.wait()

    with pytest.raises(OSError, match="no such block"):
        fail_while_others_wait()
    assert not read


def test_auto_threads_is_limited() -> None:
    assert 1 <= auto_threads() <= MAX_THREADS
