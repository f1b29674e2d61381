"""Watches a server from a process of its own: how long /health takes, and the pauses of one steady stream.

    python scripts/stress/watch.py URL [API_KEY]

Prints "ready", then each sample as a line "KIND TIME SECONDS" until its standard input ends. KIND is health (one answer
of /health), gap (a pause between two events of the stream), first (the time to its first event), late (how much later
than asked this process woke up: what a busy machine adds to everything) or error (followed by a sentence).
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from wire import Target, UsageError, exchange, stream

PAUSE = 0.05
"""Seconds between two pings."""
PATIENCE = 60.0
"""Seconds after which an answer counts as not coming."""


class Watcher:
    """Runs this file as a process and keeps its samples."""

    def __init__(self, target: Target) -> None:
        command = [sys.executable, str(Path(__file__)), target.url, target.key]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise UsageError(f"the watcher of {target.url} did not start")
        self._samples: list[tuple[str, float, float]] = []
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, now, value = line.rstrip("\n").split(" ", 2)
            if kind == "error":
                self.errors.append(value)
            else:
                self._samples.append((kind, float(now), float(value)))

    def worst(self, begin: float, end: float) -> Worst:
        """The worst of each kind in the samples that ended from `begin` to `end`, both time.monotonic()."""
        by_kind: dict[str, float] = defaultdict(float)
        for kind, now, seconds in list(self._samples):
            if begin <= now and now - seconds <= end:
                by_kind[kind] = max(by_kind[kind], seconds)
        return Worst(dict(by_kind))

    def close(self) -> None:
        """End the process, once the answers that it waits for have come."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE + 5)
        self._reader.join(5)


@dataclass(frozen=True)
class Worst:
    """The longest wait of each kind, seconds."""

    by_kind: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> float:
        return self.by_kind.get(kind, 0.0)

    @property
    def stall(self) -> float:
        """The longest wait for /health or the next event, less what the machine itself was late."""
        return max(0.0, max(self["health"], self["gap"]) - self["late"])


class _Printer:
    """Prints samples from several threads until the input ends."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def put(self, kind: str, value: float | str) -> None:
        with self._lock:
            print(kind, f"{time.monotonic():.6f}", value, flush=True)


def _ping(target: Target, printer: _Printer) -> None:
    """Ask for /health again and again; any answer in time counts, an overloaded server may say so."""
    while not printer.stopped.is_set():
        asked = time.monotonic()
        time.sleep(PAUSE)
        printer.put("late", round(max(0.0, time.monotonic() - asked - PAUSE), 6))
        answer = exchange(target, target.get("/health"), timeout=PATIENCE)
        printer.put("health", round(answer.seconds, 6))
        if answer.status != 200:
            printer.put("error", f"/health: {answer}".replace("\n", " "))


def _follow(target: Target, printer: _Printer) -> None:
    """Read one stream after another."""
    while not printer.stopped.is_set():
        begin = last = time.monotonic()
        body = {"prompt": [1], "max_tokens": min(400, target.max_len - 1), "ignore_eos": True, "temperature": 0}
        try:
            for now, _ in stream(target, body, PATIENCE):
                printer.put("first" if last == begin else "gap", round(now - last, 6))
                last = now
                if printer.stopped.is_set():
                    break
        except OSError as error:
            printer.put("gap", round(time.monotonic() - last, 6))
            printer.put("error", f"the steady stream: {error}".replace("\n", " "))
            time.sleep(PAUSE)


def main() -> int:
    target = Target.at(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
    printer = _Printer()
    threads = [threading.Thread(target=work, args=(target, printer)) for work in (_ping, _follow)]
    print("ready", flush=True)
    for thread in threads:
        thread.start()
    sys.stdin.read()
    printer.stopped.set()
    for thread in threads:
        thread.join(PATIENCE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
