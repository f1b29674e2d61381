from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RESULTS = "RAY_SERVE_RESULTS"
"""Environment variable that `make ray-serve-test` sets: the file that the tests on a cluster write what they saw to."""
MARK = "ENGINE_TEST_OF_RAY_SERVE"
"""An environment variable that all processes of the cluster have."""


class Record:
    """What the tests on a cluster saw."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.results: dict[str, dict[str, Any]] = {}

    def add(self, name: str, **figures: Any) -> None:
        self.results[name] = figures

    def write(self) -> None:
        import ray

        from engine.cli.bench.report import header, write

        settings = {"ray": ray.__version__, "cores": os.cpu_count(), "engine": "tests/server/fake_engine.py"}
        Path(self._file).parent.mkdir(parents=True, exist_ok=True)
        write(Path(self._file), header("ray-serve", "CPU", settings) | {"rows": self.results})


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    made = Record(os.environ[RESULTS])
    yield made
    if made.results:
        made.write()


def eventually(condition: Callable[[], bool], seconds: float = 300) -> float:
    """Wait until a condition holds; the seconds that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, f"the condition did not hold within {seconds} s"
        time.sleep(0.1)
    return time.monotonic() - start


@pytest.fixture(scope="session")
def until() -> Callable[..., float]:
    return eventually


def marked(directory: str) -> list[int]:
    """The processes that the cluster has started, but those that only wait to be reaped."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if f"{MARK}={directory}".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except (OSError, ValueError):
            continue
    return [process for process in found if process != os.getpid()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of one node, with Ray Serve; the URL of its proxy. Afterwards no process of it is left."""
    import ray
    from ray import serve

    tests = Path(__file__).parent.parent
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it is part of sockets' names
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # 15 unless set: next to nothing of a busy machine
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the user's home
        patch.setenv("RAY_raylet_start_wait_time_s", "300")
        patch.setenv("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
        patch.setenv("PYTHONPATH", str(tests))
        patch.setenv(MARK, directory)
        patch.syspath_prepend(str(tests))
        handler = signal.getsignal(signal.SIGTERM)
        port = free_port()
        try:
            ray.init(
                num_cpus=3,  # Ray starts that many workers in advance
                object_store_memory=80 << 20,
                include_dashboard=False,
                log_to_driver=False,
                _plasma_directory=directory,
            )
            serve.start(http_options={"port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()
            signal.signal(signal.SIGTERM, handler)
            eventually(lambda: marked(directory) == [])


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def clear_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes logging as in a process that has set up nothing; that of the tests is put back afterwards."""
    root, access = logging.getLogger(), logging.getLogger("engine.server.access")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in (root, access)]
    yield root.handlers.clear  # not now: pytest has a handler of its own per phase of a test
    logging.captureWarnings(False)
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
