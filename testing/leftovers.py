"""What this process has, so that a test can tell what something has left behind: threads, processes, open files."""

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
"""Seconds that what is ending gets to be gone."""


@frozen(kw_only=True)
class Belongings:
    """At one moment. On systems other than Linux there are threads alone."""

    threads: Counter[str]
    """By name."""
    processes: Counter[str]
    """Started by this one and those, as "number command"; dead ones that nobody has reaped too."""
    descriptors: Counter[str]
    """What files are open, without numbers."""
    shared_memory: Counter[str]
    """Names in /dev/shm."""

    def more_than(self, other: Belongings) -> list[str]:
        """What `other` lacks, in words."""
        kinds = (
            ("thread", self.threads - other.threads),
            ("process", self.processes - other.processes),
            ("open file", self.descriptors - other.descriptors),
            ("/dev/shm has", self.shared_memory - other.shared_memory),
        )
        return [f"{kind} {name}" for kind, found in kinds for name in sorted(found)]


def belongings() -> Belongings:
    """What there is now."""
    gc.collect()  # what nobody refers to is closed by that
    return Belongings(
        threads=Counter(thread.name for thread in threading.enumerate()),
        processes=Counter(_descendants(os.getpid())),
        descriptors=Counter(_descriptors()),
        shared_memory=Counter(_listed("/dev/shm")),
    )


def assert_nothing_left(before: Belongings, whose: str, excused: Sequence[str] = ()) -> None:
    """Fail if, after a while, there is still more than before.

    excused: regular expressions of what need not be gone, in the words of `more_than`.
    """
    deadline = time.monotonic() + PATIENCE
    while left := [one for one in belongings().more_than(before) if not any(re.search(how, one) for how in excused)]:
        assert time.monotonic() < deadline, f"{whose} left behind: {'; '.join(left)}"
        time.sleep(0.05)


def _descendants(process: int) -> Iterator[str]:
    for task in _listed(f"/proc/{process}/task"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            for child in Path(f"/proc/{process}/task/{task}/children").read_text(encoding="utf-8").split():
                yield f"{child} {Path(f'/proc/{child}/comm').read_text(encoding='utf-8').strip()}"
                yield from _descendants(int(child))


def _descriptors() -> Iterator[str]:
    for descriptor in _listed("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the directory itself is among them
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            yield name.partition(":")[0] if name.startswith(("socket:", "pipe:", "anon_inode:")) else name


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []
