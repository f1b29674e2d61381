"""Sampled stacks of a process: shares by function, by module and of waiting."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from attrs import frozen

FRAME = re.compile(r"(.*) \((.*?)(?::(\d+))?\)")
"""A frame: function (file:line)."""
THREAD = re.compile(r"thread \((?:0x)?[0-9A-Fa-f]+\)(?:: )?(.*)")
LIBRARY = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+t?)/")
ENGINE = re.compile(r".*/(?:src/)?engine/(?=(?:cli|core|demo|ops|plugins|quantize|server|testing)/)")

WAITS = (
    ("shared memory between processes", re.compile(r"engine/core/shm/|_ring\b|^(?:take|put)_ring")),
    ("the other ranks", re.compile(r"engine/core/distributed/|^nccl|gloo::")),
    ("the device", re.compile(r"\b(?:synchronize|to_host)\b|cudaEventSynchronize|cuStreamSynchronize")),
    ("sockets", re.compile(r"\b(?:epoll_wait|poll|select|recv|accept)\b|zmq/(?:sugar|backend)|selectors\.py")),
    ("locks and queues", re.compile(r"\b(?:futex|pthread_cond_\w+|sem_\w+)\b|threading\.py|/queue\.py")),
    ("a yielding loop", re.compile(r"\bsched_yield\b")),
)
"""(what is waited for, top of the stacks that wait for it)."""


@frozen
class Sampled:
    """The stacks of one process."""

    counts: Mapping[tuple[str, ...], int]
    """Stack, from the thread's name to the innermost frame -> samples."""

    @classmethod
    def of(cls, raw: str) -> Sampled:
        """Parse py-spy's raw format: THREAD;FRAME;FRAME COUNT per line."""
        counts: Counter[tuple[str, ...]] = Counter()
        for line in raw.splitlines():
            stack, _, count = line.rpartition(" ")
            if stack and count.isdigit():
                counts[tuple(shortened(frame) for frame in stack.split(";"))] += int(count)
        return cls(counts)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(self.counts.values())

    def top(self) -> Counter[str]:
        """Samples by the function at the top of the stack, of any line."""
        found: Counter[str] = Counter()
        for stack, count in self.counts.items():
            found[without_line(stack[-1])] += count
        return found

    def modules(self) -> Counter[str]:
        """Samples by the module at the top of the stack."""
        found: Counter[str] = Counter()
        for stack, count in self.counts.items():
            found[module_of(stack[-1])] += count
        return found

    def waits(self) -> Counter[str]:
        """Samples at functions that wait, by what they wait for."""
        found: Counter[str] = Counter()
        for stack, count in self.counts.items():
            waited = waits_for(stack[-1])
            if waited:
                found[waited] += count
        return found


def shortened(frame: str) -> str:
    """A frame with the file's path from its package on; of a thread, its name."""
    if (thread := THREAD.fullmatch(frame)) is not None:
        return thread[1] or "a thread without a name"
    found = FRAME.fullmatch(frame)
    if found is None:
        return frame
    function, file, line = found.groups()
    file = path_in_package(file)
    return f"{function} ({file}:{line})" if line else f"{function} ({file})"


def path_in_package(file: str) -> str:
    """The path of a source file from its package on; of a file in no package, unchanged."""
    return ENGINE.sub("engine/", file) if ENGINE.match(file) else LIBRARY.sub("", file)


def without_line(frame: str) -> str:
    """A frame without the number of the line."""
    return re.sub(r":\d+\)$", ")", frame)


def module_of(frame: str) -> str:
    """The package of a frame's file: two levels of the engine's own, one of others; "native" for one without a file."""
    found = FRAME.fullmatch(frame)
    if found is None:
        return "native"
    parts = found[2].split("/")
    if parts[0] == "engine":
        return ".".join(parts[: min(3, len(parts) - 1)])
    return parts[0].removesuffix(".py") if parts[0] else parts[-1].removesuffix(".py")


def waits_for(frame: str) -> str:
    """What the function of a frame waits for; empty for one that does not wait."""
    return next((name for name, pattern in WAITS if pattern.search(frame)), "")
