from __future__ import annotations

import threading

import pytest
import torch

from engine.core.weights.readers import MOST_THREADS, Piece, Readers, auto_threads


def test_pieces_are_begun_in_the_order_of_the_file() -> None:
    begun: list[tuple[str, int]] = []

    def piece(file: str, offset: int) -> Piece:
        def read(memory: memoryview) -> None:
            begun.append((file, offset))

        return Piece((file, offset), torch.empty(1, dtype=torch.uint8), read)

    with Readers("cpu", 1) as readers:
        readers.start([piece("b", 0), piece("a", 9), piece("a", 3)]).wait()
    assert begun == [("a", 3), ("a", 9), ("b", 0)]


def test_several_threads_read_at_once() -> None:
    both = threading.Barrier(2, timeout=10)
    target = torch.empty(2, 4, dtype=torch.uint8)

    def read(memory: memoryview) -> None:
        both.wait()
        memory[:] = b"\7" * 4

    with Readers("cpu", 2) as readers:
        readers.start(Piece(("a", row), target[row], read) for row in range(2)).wait()
    assert target.tolist() == [[7] * 4] * 2


def test_what_has_not_begun_is_dropped_after_an_error() -> None:
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
        with Readers("cpu", 1) as readers:
            failing = readers.start([Piece(("a", 0), target, fail)])
            readers.start([Piece(("a", 1), target, wait)])
            readers.start([Piece(("a", 2), target, work) for _ in range(50)])
            threading.Timer(0.05, first.set).start()
            failing.wait()

    with pytest.raises(OSError, match="no such block"):
        fail_while_others_wait()
    assert not read


def test_threads_by_the_number_of_processors() -> None:
    assert 1 <= auto_threads() <= MOST_THREADS
