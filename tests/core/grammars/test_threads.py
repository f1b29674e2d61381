from __future__ import annotations

import threading

import pytest

from engine.core.errors import ExecutorError
from engine.core.grammars.threads import CompileThreads


def test_close_fails_what_has_not_begun_and_waits_for_what_has() -> None:
    threads, begun, let_go = CompileThreads(1), threading.Event(), threading.Event()

    def hold() -> int:
        begun.set()
        let_go.wait()
        return 1

    current = threads.submit(hold)
    begun.wait()
    queued = threads.submit(lambda: 2)
    closing = threading.Thread(target=threads.close)
    closing.start()
    try:
        with pytest.raises(ExecutorError, match="the engine is closed"):
            queued.result(timeout=10)
        assert closing.is_alive()
    finally:
        let_go.set()
        closing.join()
    assert current.result() == 1


def test_submit_starts_no_thread_after_close() -> None:
    threads = CompileThreads(1)
    assert threads.submit(lambda: 1).result() == 1
    threads.close()
    before = set(threading.enumerate())  # of which other tests' may end meanwhile
    with pytest.raises(ExecutorError, match="the engine is closed"):
        threads.submit(lambda: 2).result(timeout=10)
    assert set(threading.enumerate()) <= before


def test_close_drops_a_future_that_was_cancelled() -> None:
    threads, begun, let_go = CompileThreads(1), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        let_go.wait()

    threads.submit(hold)
    begun.wait()
    queued = threads.submit(lambda: 2)
    assert queued.cancel()
    let_go.set()
    threads.close()
    assert queued.cancelled()
