"""A server started for a test, its processes, and clients that load it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from processes import Leftovers, Process, alive, family
from wire import Target, UsageError, exchange, stream, until

COMMAND = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()", "serve", "--port", "0")
START_SECONDS = 120.0


class Server:
    """`engine serve` with these flags on a free port of 127.0.0.1; no flags: the demo model."""

    def __init__(self, flags: Sequence[str], directory: Path) -> None:
        """directory: for the server's temporary files and its log. Raises UsageError when it does not start."""
        self.directory = directory
        self.log = directory / "server.log"
        self.before = Leftovers.now(directory)
        self._seen: set[int] = set()
        environment = os.environ | {"TMPDIR": str(directory)}
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(
                [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        assert self.process.stdout is not None
        killer = threading.Timer(START_SECONDS, self.process.kill)
        killer.start()
        lines = iter(self.process.stdout)
        url = next((line.split()[-1] for line in lines if line.startswith("Listening on ")), "")
        killer.cancel()
        if not url:
            raise UsageError(f"the server did not start; its log is {self.log}")
        self._reader = threading.Thread(target=self._read_output, daemon=True)  # so that the pipe never fills
        self._reader.start()
        self.target = Target.at(url)
        self.processes()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            output.read()

    def processes(self) -> list[Process]:
        """The processes that run now."""
        found = family(self.process.pid)
        self._seen |= {one.pid for one in found}
        return found

    def healthy(self, timeout: float = 2.0) -> bool:
        """Whether /health answers 200 in time."""
        return exchange(self.target, self.target.get("/health"), timeout=timeout).status == 200

    def answers(self) -> bool:
        """Whether one token is computed."""
        body = {"model": self.target.model, "prompt": [1], "max_tokens": 1}
        return exchange(self.target, self.target.post("/v1/completions", body), timeout=10).status == 200

    def stop(self, seconds: float = 30.0) -> int | None:
        """Send SIGTERM; the exit status, or None if the server has to be killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        self.process.kill()
        self.process.wait()
        return None

    def remains(self, seconds: float = 10.0) -> list[str]:
        """What is left of an ended server after that many seconds: processes, shared memory, directories.

        Processes that are left are killed.
        """
        until(lambda: not alive(self._seen), seconds)
        self._reader.join(1)
        orphans = alive(self._seen)
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = Leftovers.now(self.directory).beyond(self.before)
        return [*(f"process {pid}" for pid in orphans), *left]


class Load:
    """Clients that stream completions of random lengths, one after another; a share of them hangs up."""

    def __init__(
        self, target: Target, clients: int, *, seed: int, hang_up: float, lengths: tuple[int, int], patience: float
    ) -> None:
        """hang_up: share of streams that are left early. lengths: maximum tokens of a prompt and of an output.
        patience: seconds without an event after which a stream counts as hung."""
        self._target = target
        self._hang_up, self._lengths, self._patience = hang_up, lengths, patience
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """finished, left, ended (with an error or a closed connection), refused (no stream began), hung; events."""
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(seed * 1000 + number),), daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """Let all clients leave; whether all did within their patience."""
        self._stopped.set()
        deadline = time.monotonic() + self._patience + 5
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def count(self) -> Counter[str]:
        with self._lock:
            return self.counts.copy()

    def _work(self, draw: random.Random) -> None:
        while not self._stopped.is_set():
            outcome = self._one(draw)
            with self._lock:
                self.counts[outcome] += 1
            if outcome in ("refused", "ended"):
                self._stopped.wait(0.2)

    def _one(self, draw: random.Random) -> str:
        """Read one stream; returns its outcome, a key of `counts`."""
        prompt = [draw.randrange(100) for _ in range(draw.randint(1, self._lengths[0]))]
        tokens = draw.randint(1, self._lengths[1])
        leave_after = draw.randint(0, tokens) if draw.random() < self._hang_up else tokens + 2
        events = 0
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": draw.choice((0.0, 1.0))}
        try:
            for _, events in stream(self._target, body, self._patience):
                if events >= leave_after or self._stopped.is_set():
                    return "left"
            return "finished"
        except TimeoutError:
            return "hung"
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "ended"
        finally:
            with self._lock:
                self.counts["events"] += events


def wait_gone(pid: int, seconds: float) -> float | None:
    """Seconds until a process has ended; None when it has not after `seconds`."""
    begin = time.monotonic()
    return time.monotonic() - begin if until(lambda: not alive([pid]), seconds, 0.01) else None
