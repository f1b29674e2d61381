"""Lists threads, child processes, open files and shared memory, so that a test can find what was left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

PATIENCE = 20.0
"""Seconds to wait for threads, processes and files that are being closed."""


@frozen(kw_only=True)
class Belongings:
    """What this process owns at one moment. On systems other than Linux, only threads are listed."""

    threads: Counter[str]
    """By name."""
    processes: Counter[str]
    """Descendants of this process as "pid command", exited ones that are not reaped included."""
    descriptors: Counter[str]
    """Open files, sockets and pipes, without their numbers."""
    shared_memory: Counter[str]
    """Names in /dev/shm."""

    def more_than(self, other: Belongings) -> list[str]:
        """What `other` lacks, one description each."""
        kinds = (
            ("thread", self.threads - other.threads),
            ("process", self.processes - other.processes),
            ("open file", self.descriptors - other.descriptors),
            ("/dev/shm has", self.shared_memory - other.shared_memory),
        )
        return [f"{kind} {name}" for kind, found in kinds for name in sorted(found)]


def belongings() -> Belongings:
    """What this process owns now."""
    gc.collect()  # closes files that only unreachable objects hold open
    return Belongings(
        threads=Counter(thread.name for thread in threading.enumerate()),
        processes=Counter(_descendants(os.getpid())),
        descriptors=Counter(_descriptors()),
        shared_memory=Counter(_listed("/dev/shm")),
    )


def assert_nothing_left(before: Belongings, whose: str, excused: Sequence[str] = ()) -> None:
    """Fail if the process still owns more than `before` after PATIENCE seconds.

    whose: who is to blame, for the message. excused: regular expressions of `more_than` descriptions to ignore.
    """

    def leftovers() -> list[str]:
        found = belongings().more_than(before)
        return [item for item in found if not any(re.search(pattern, item) for pattern in excused)]

    deadline = time.monotonic() + PATIENCE
    while left := leftovers():
        assert time.monotonic() < deadline, f"{whose} left behind: {'; '.join(left)}"
        time.sleep(0.05)


def _descendants(process: int) -> Iterator[str]:
    for task in _listed(f"/proc/{process}/task"):
        with contextlib.suppress(OSError):  # the process may exit meanwhile
            for child in Path(f"/proc/{process}/task/{task}/children").read_text(encoding="utf-8").split():
                yield f"{child} {Path(f'/proc/{child}/comm').read_text(encoding='utf-8').strip()}"
                yield from _descendants(int(child))


def _descriptors() -> Iterator[str]:
    for descriptor in _listed("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing includes the directory's own descriptor, closed by now
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            yield name.partition(":")[0] if name.startswith(("socket:", "pipe:", "anon_inode:")) else name


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
