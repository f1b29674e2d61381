"""A server under load: starts `engine serve` or connects to one, and measures the CPU time of its processes."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from engine.cli.config import to_toml
from engine.cli.http_client import split_url
from engine.cli.processes import family, own_cpu_seconds
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, ExecutorError
from engine.server.shared.api_keys import read_api_keys
from engine.server.shared.authority import authority

COMMAND = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()")
STOP_TIMEOUT = 60.0
"""Seconds between SIGTERM and SIGKILL."""


@frozen(kw_only=True)
class Server:
    """A running server."""

    host: str
    port: int
    model: str
    """Name of the served model."""
    pid: int | None
    """Process id of the supervisor; None: unknown, and with it the CPU time."""

    @property
    def url(self) -> str:
        """The address, without a path."""
        return f"http://{authority(self.host, self.port)}"

    @classmethod
    def at(cls, url: str, api_key: str, pid: int | None) -> Server:
        """Connect to the server at an address. Raises InvalidRequestError for what is no URL, and
        ConfigError if the server does not answer as ours do."""
        parts = split_url(url)
        host, port = parts.hostname or "", parts.port or 80
        if parts.scheme != "http":
            raise ConfigError(f"--url {url!r} is not served by http; give one as http://127.0.0.1:8000")
        if parts.path.rstrip("/") not in ("", "/v1"):
            raise ConfigError(
                f"--url {url!r} has a path, and the load is sent to /v1/completions of the host; give the URL of the"
                f" server itself, as http://{authority(host, port)}"
            )
        status, _ = get(host, port, "/health", api_key)
        if status != 200:
            raise ConfigError(
                f"the server at {url} is not healthy: /health answers with status {status}; wait until it has started,"
                " or give the address of another"
            )
        status, body = get(host, port, "/v1/models", api_key)
        if status != 200:
            raise ConfigError(f"the server at {url} does not name its model (status {status}); is --api-key right?")
        try:
            model = json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"the server at {url} does not name its model; is it `engine serve`?") from None
        return cls(host=host, port=port, model=model, pid=pid)


@contextmanager
def running(config: EngineConfig) -> Iterator[Server]:
    """Start `engine serve` with this configuration and yield once the server answers; stop it at the end.

    Raises ExecutorError when it does not start; its own words are on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as directory:
        file = Path(directory) / "serve.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        process = subprocess.Popen([*COMMAND, "serve", "--config", str(file)], stdout=subprocess.PIPE, text=True)
        try:
            url = _announced(process)
            yield Server.at(url, first_api_key(config), process.pid)
        finally:
            _stop(process)


def first_api_key(config: EngineConfig) -> str:
    """An API key that the server accepts; empty if clients need none."""
    return next(iter(read_api_keys(config.server)), "")


def _announced(process: subprocess.Popen[str]) -> str:
    """Read the address that the server prints once ready."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Listening on "):
            threading.Thread(target=process.stdout.read, daemon=True).start()  # so that the pipe never fills
            return line.split()[-1]
    raise ExecutorError(f"the server did not start: it exited with status {process.wait()}; its output is above")


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def cpu_seconds(pid: int) -> float:
    """CPU seconds used so far by a process and all its descendants. Raises ConfigError for an unknown process id."""
    processes = family(pid)
    if not processes:
        raise ConfigError(f"there is no process {pid}; give the server's as --server-pid")
    return sum(own_cpu_seconds(process.pid) for process in processes)


def get(host: str, port: int, path: str, api_key: str) -> tuple[int, Any]:
    """Status and body of a GET request. Raises ConfigError when no server answers for 10 s, or none by HTTP."""
    deadline = time.monotonic() + 10
    while True:
        connection = http.client.HTTPConnection(host, port, timeout=30)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
            response = connection.getresponse()
            return response.status, response.read()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"no server answers at http://{authority(host, port)}: {error}; start it with `engine serve`, or"
                    " give another address"
                ) from error
            time.sleep(0.1)
        except http.client.HTTPException as error:
            raise ConfigError(f"{error!r} from http://{authority(host, port)}; is it an HTTP server?") from error
        finally:
            connection.close()
