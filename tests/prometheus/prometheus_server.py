"""A real Prometheus that scrapes one server, for the tests and for scripts/draw_dashboard.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
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
JOB = "vllm"
"""Some queries select the jobs whose names contain this."""
VARIABLE = re.compile(r"\$(?:(\w+)|{(\w+)})")
SELECTOR = re.compile(r"(?<![\w.:])[a-zA-Z_:][\w:]*(?:{[^}]*})?(?![\w:]|\s*\()")
NO_SERIES = re.compile(r"\[[^\]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
"""Ranges, and lists of labels."""
OPERATORS = {"or", "and", "unless", "bool", "offset"}


def executable() -> str | None:
    """Path of Prometheus, as `make prometheus-test` names it in $PROMETHEUS; None if nothing does."""
    return os.environ.get("PROMETHEUS") or None


class Prometheus:
    """A running Prometheus. Its methods raise AssertionError for what it refuses."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now."""
        result: list[dict[str, Any]] = self._answer("query", {"query": expression})["result"]
        return result

    def range(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """The series of an expression, a point per second."""
        params = {"query": expression, "start": start, "end": end, "step": 1}
        result: list[dict[str, Any]] = self._answer("query_range", params)["result"]
        return result

    def label_values(self, label: str, series: str | None = None) -> list[str]:
        """The values of a label, of all series or of those that a selector selects."""
        result: list[str] = self._answer(f"label/{label}/values", {} if series is None else {"match[]": series})
        return result

    def _answer(self, path: str, params: dict[str, Any]) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", f"{params}: {answer}"
        return answer["data"]


@contextlib.contextmanager
def scraping(command: str, target: str) -> Iterator[Prometheus]:
    """Run Prometheus until the block ends. target: host and port; labels that a cluster would add are added."""
    with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        labels = {"namespace": "llm-d", "service": "engine", "pod": "engine-0"}
        config = {
            "global": {"scrape_interval": INTERVAL},
            "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [target], "labels": labels}]}],
        }
        file = Path(directory) / "prometheus.yml"
        file.write_text(json.dumps(config))
        options = [f"--config.file={file}", f"--storage.tsdb.path={directory}/data", f"--web.listen-address={address}"]
        process = subprocess.Popen([command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=30) as http:
                until(lambda: http.get("/-/ready").status_code == 200)
                yield Prometheus(http)
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


def filled(expression: str, model: str, **more: str) -> str:
    """An expression of a dashboard with values in place of its variables. more: further variables."""
    values = dict.fromkeys(("__rate_interval", "__interval", "interval", "aggregate_interval"), "10s")
    values |= {"__range": "30s", "job": ".*", "instance": ".*", "engine": ".*", "job_name": JOB}
    values |= {"NS": "llm-d", "namespace": "llm-d", "SVC": "engine", "deployment": "engine"}
    values |= dict.fromkeys(("model_name", "model", "Deployment_id", "MODEL"), model)
    return VARIABLE.sub(lambda name: (values | more)[name[1] or name[2]], expression)


def selectors(expression: str) -> list[str]:
    """The selectors of series in an expression."""
    return [found for found in SELECTOR.findall(NO_SERIES.sub("", expression)) if found not in OPERATORS]
