"""A real Prometheus that scrapes one server, for the tests and for scripts/draw_dashboard.py."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
INTERVAL = "1s"
"""How often Prometheus scrapes."""


def executable() -> str | None:
    """Path of Prometheus, as `make prometheus-test` names it in $PROMETHEUS; None if nothing does."""
    return os.environ.get("PROMETHEUS") or None


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now. Raises AssertionError for one that Prometheus refuses."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def range(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """The series of an expression, a point a second."""
        params: dict[str, Any] = {"query": expression, "start": start, "end": end, "step": 1}
        answer = httpx.get(f"{self.url}/api/v1/query_range", params=params, timeout=30).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result


@contextlib.contextmanager
def scraping(command: str, target: str) -> Iterator[Prometheus]:
    """Run Prometheus until the block ends. target: host and port; labels that a cluster would add are added."""
    with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        labels = {"namespace": "default", "service": "engine", "pod": "engine-0"}
        config = {
            "global": {"scrape_interval": INTERVAL},
            "scrape_configs": [{"job_name": "engine", "static_configs": [{"targets": [target], "labels": labels}]}],
        }
        file = Path(directory) / "prometheus.yml"
        file.write_text(json.dumps(config))
        options = [f"--config.file={file}", f"--storage.tsdb.path={directory}/data", f"--web.listen-address={address}"]
        process = subprocess.Popen([command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: httpx.get(f"http://{address}/-/ready").status_code == 200)
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait()


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until `condition` holds; what cannot be reached does not hold yet."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.TransportError):
            if condition():
                return
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s"
        time.sleep(0.1)


@contextlib.contextmanager
def load(url: str, model: str, clients: int = 4) -> Iterator[None]:
    """Completions from some clients until the block ends: equal prefixes, several choices."""
    done = threading.Event()

    def ask() -> None:
        number = 0
        with httpx.Client(base_url=url, timeout=60) as http:
            while not done.is_set():
                number += 1
                body = {
                    "model": model,
                    "prompt": f"# {number % 7}\n" + "def read(path):\n" * 8,
                    "max_tokens": 8 + number % 24,
                }
                with contextlib.suppress(httpx.TransportError):
                    http.post("/v1/completions", json=body | ({"n": 2} if number % 5 == 0 else {}))

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def filled(expression: str, model: str) -> str:
    """An expression of a dashboard with values in place of its variables."""
    values = {"$__rate_interval": "10s", "$__interval": "10s", "$__range": "30s", "$job": ".*", "$instance": ".*"}
    values |= {"$NS": "default", "$namespace": "default", "$SVC": "engine"}
    values |= dict.fromkeys(("$model_name", "$Deployment_id", "$MODEL"), model)
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression
