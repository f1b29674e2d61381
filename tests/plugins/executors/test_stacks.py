"""Summaries of stack dumps."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

import pytest

from engine.plugins.executors.heartbeat import WorkerHeartbeat
from engine.plugins.executors.stacks import MAX_FRAMES, busy_stack

DUMP = """Thread 0x00007f00000000a1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 10 in wait
  File "/src/loop.py", line 20 in first

Thread 0x00007f00000000a2 [results] (most recent call first):
  File "/src/runner.py", line 30 in second

Current thread 0x00007f00000000a3 (most recent call first):
  File "/src/main.py", line 40 in third
"""


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        ((0x7F00000000A3, 0x7F00000000A2), "its stack is third (main.py:40)"),
        ((0, 0x7F00000000A2), "its stack is second (runner.py:30)"),
        ((0, 0), "its stack is wait (threading.py:10) < first (loop.py:20)"),
    ],
)
def test_busy_stack_is_of_the_first_busy_thread_in_the_dump(busy: tuple[int, int], expected: str) -> None:
    assert busy_stack(DUMP, busy) == expected


def test_busy_stack_is_empty_without_frames() -> None:
    assert busy_stack("", (1, 2)) == ""
    assert busy_stack("Thread 0x00007f00000000a1 (most recent call first):\n", (1, 2)) == ""


def test_busy_stack_shows_the_innermost_frames() -> None:
    dump = "Thread 0x00000000000000a1 (most recent call first):\n" + "".join(
        f'  File "deep.py", line {line} in frame\n' for line in range(20)
    )
    assert busy_stack(dump, ()).count(" < ") == MAX_FRAMES - 1


def test_busy_stack_finds_the_thread_that_waits_for_a_result() -> None:
    heartbeat, waits, over = WorkerHeartbeat.private(), threading.Event(), threading.Event()

    def wait_for_result() -> None:
        heartbeat.begin_wait()
        waits.set()
        over.wait(30)

    heartbeat.begin_step(1)
    thread = threading.Thread(target=wait_for_result)
    thread.start()
    assert waits.wait(30)
    try:
        assert "wait_for_result" in busy_stack(dump_of_all(), heartbeat.busy_threads)
    finally:
        over.set()
        thread.join()
    heartbeat.finish_step()
    assert "dump_of_all" in busy_stack(dump_of_all(), heartbeat.busy_threads)


def dump_of_all() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
