"""Commands with a model of the hub, in processes of their own, with the environment variables of huggingface_hub."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.hub.cache import Cache

from .hub_server import Hub

NAME = "Some-Org/tiny"
COMMAND = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()")
SIZE = 2_000_000
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hub(servers: Hub) -> Hub:
    """The local hub with one model, of SIZE bytes and a little more."""
    servers.reset()
    servers.add(NAME, {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": os.urandom(SIZE)})
    return servers


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Iterator[Start]:
    """start("download", NAME, HF_TOKEN="x"): a process of the command line, which ends with the test."""
    started = []

    def popen(*arguments: str, stderr: int = subprocess.PIPE, **environment: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                (*COMMAND, *arguments),
                env={**inherited, **home, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        )
        return started[-1]

    yield popen
    for process in started:
        process.kill()
        process.communicate()


def output(process: subprocess.Popen[str]) -> str:
    """The standard output of a process that succeeds."""
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return printed


def until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, while the process runs."""
    while not condition():
        assert process.poll() is None
        time.sleep(0.02)


def weights_requests(hub: Hub) -> list[int | None]:
    """The byte from which on the weights were asked for, per request."""
    return [one.begin for one in hub.requests if one.method == "GET" and one.path.endswith("model.safetensors")]


def test_download_continues_after_an_interrupt_and_is_found_offline(hub: Hub, start: Start, tmp_path: Path) -> None:
    kept = SIZE // 10
    hub.holds["model.safetensors"] = kept
    interrupted = start("download", NAME)
    blobs = Cache(tmp_path / "hub", NAME).folder / "blobs"
    until(interrupted, lambda: any(part.stat().st_size == kept for part in blobs.glob("*.incomplete")))
    interrupted.send_signal(signal.SIGINT)
    _, errors = interrupted.communicate(timeout=30)
    assert interrupted.returncode != 0
    assert "Traceback" not in errors
    hub.released.set()

    resumed = start("download", NAME, "--json")
    printed, errors = resumed.communicate(timeout=60)
    assert (resumed.returncode, weights_requests(hub)) == (0, [None, kept])
    [first, *_, last] = errors.splitlines()
    assert first.startswith(f"download of {NAME}: ")
    assert last == f"download of {NAME}: 2 MB of 2 MB (100%)"
    found = json.loads(printed)
    assert set(found) == {"model", "commit", "directory"}
    assert Path(found["directory"]).parent.name == "snapshots"

    hub.requests.clear()
    assert output(start("download", NAME, HF_HUB_OFFLINE="1")) == found["directory"] + "\n"
    assert not hub.requests


def test_two_downloads_at_once_fetch_the_weights_once(hub: Hub, start: Start) -> None:
    hub.holds["model.safetensors"] = SIZE // 10
    both = [start("download", NAME) for _ in range(2)]
    until(both[0], lambda: hub.asked("HEAD")["model.safetensors"] >= 2)
    hub.released.set()
    first, second = map(output, both)
    assert first == second
    assert (Path(first.strip()) / "model.safetensors").stat().st_size == SIZE
    assert weights_requests(hub) == [None]


def test_download_updates_one_line_of_a_terminal(hub: Hub, start: Start) -> None:
    ours, theirs = pty.openpty()
    process = start("download", NAME, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
    os.close(ours)
    assert output(process).startswith("/")
    lines = shown.decode().split("\r\x1b[2K")
    assert lines[0] == lines[-1] == "", "the line is erased at the end"
    assert lines[1].startswith(f"download of {NAME}: 0 B of 2 MB (0%)")
    assert lines[-2] == f"download of {NAME}: 2 MB of 2 MB (100%)"


@pytest.mark.e2e
def test_serve_answers_with_a_model_of_the_hub(hub: Hub, start: Start, engine_checkpoint: Path) -> None:
    files = {file.name: file.read_bytes() for file in engine_checkpoint.iterdir()}
    commit = hub.add("org/served", files, private=True, token="secret")
    arguments = ("--kv-memory", "4MiB", "--dtype", "float32", "--device", "cpu", "--port", "0", "--api-workers", "1")
    server = start("serve", "org/served", "--revision", "main", *arguments, HF_TOKEN="secret")
    assert server.stdout is not None
    lines = []
    for line in server.stdout:
        lines.append(line)
        if line.startswith("Listening on "):
            break
    assert lines[0].startswith(f"org/served (commit {commit[:8]}) on ")
    url = lines[-1].split()[-1]
    [model] = answer(f"{url}/v1/models")["data"]
    assert (model["id"], model["revision"]) == ("org/served", commit)
    assert answer(f"{url}/v1/models/org/served") == model
    body = {"model": "org/served", "prompt": "def f(", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    answered = answer(f"{url}/v1/completions", body)
    assert (answered["model"], answered["usage"]["completion_tokens"]) == ("org/served", 4)
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=30)
    assert server.returncode == 0


def answer(url: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON with which a server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)
