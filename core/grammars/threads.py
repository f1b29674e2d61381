"""The threads that compile grammars: few, and with room for a deep recursion in a library."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from engine.core.errors import ExecutorError

T = TypeVar("T")

STACK_BYTES = 256 * 2**20
"""Stack of a thread: address space, of which only what is used becomes memory. Compilers descend by a few KiB for each
rule in a chain of rules, and a library that runs out of stack takes the process with it: llguidance 1.9.1 does so with
8 MiB and 3000 rules, while 20,000 fit here."""
_starting = threading.Lock()
"""Held while a thread is started: the size of stacks is a setting of the process."""


class CompileThreads:
    """Runs functions in at most `count` threads, in order. The threads start when there is work."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        """Held while jobs and threads are added, so that none are after `close`."""
        self._closed = False

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a function; its result or exception is the future's, or ExecutorError if `close` comes first."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(_closed())
                return future
            self._jobs.put((future, function))
            if len(self._threads) < self._count:
                self._threads.append(self._start_thread())
        return future

    def close(self) -> None:
        """End each thread after its current function, and wait for that; what has not begun never runs."""
        with self._lock:
            self._closed = True
        with suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                future, _ = job
                if future.set_running_or_notify_cancel():
                    future.set_exception(_closed())
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._work, name="grammars", daemon=True)
        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        return thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)


def _closed() -> ExecutorError:
    return ExecutorError("the engine is closed, so it compiles no grammars; make a new one")
