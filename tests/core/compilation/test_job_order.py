"""Which of the jobs that wait for a core the compile server takes next."""

from __future__ import annotations

from multiprocessing.connection import Pipe

from engine.core.compilation.server import NUMBER_BYTES, Server


def message(number: int, size: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES) + size.to_bytes(NUMBER_BYTES) + b"job"


def test_the_largest_job_that_waits_is_next_and_equal_ones_in_their_order() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        server = Server(theirs, 1, None)
        server._waiting += [message(0, 7), message(1, 900), message(2, 7), message(3, 30_000)]
        taken = [int.from_bytes(server._next()[:NUMBER_BYTES]) for _ in range(4)]
    assert taken == [3, 1, 0, 2]
    assert not server._waiting
