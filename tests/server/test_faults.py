"""Faults of the real server: what a client sees, and what is left of processes and files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e

ENGINE = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()")
BODY = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
NOTICE_SECONDS = 10.0
"""Seconds in which clients learn of a dead process: 2 by the documentation, and more where the machine is busy."""

SLOW = ("--attention", "faulty", "--attention-option", "at=decode", "--attention-option", "do=wait")
"""Flags with which a stream takes seconds, so that it cannot end before what a test does to it."""

Start = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engine.testing.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with faulty_plugin.py and the metadata of an installed distribution."""
    directory = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).with_name("faulty_plugin.py"), directory)
    info = directory / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[engine]\nfaulty = faulty_plugin\n")
    return directory


@pytest.fixture
def start(
    checkpoint: Path,
    plugin: Path,
    start_server: Callable[..., Any],
    alive: Callable[[int], bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Start]:
    """Starts `engine serve --executor multiproc` with these flags; afterwards checks that nothing is left of it."""
    monkeypatch.setenv("PYTHONPATH", str(plugin), prepend=os.pathsep)
    before = shared_memory()
    servers: list[Any] = []

    def serve(*flags: str, before: tuple[str, ...] = ()) -> Any:
        command = [*before, *ENGINE, "serve", "--model", str(checkpoint), "--port", "0", "--executor", "multiproc"]
        command += ["--kv-memory", "8MiB", "--max-len", "256", "--dtype", "float32", "--threads", "1"]
        servers.append(start_server([*command, "--api-workers", "1", "--replica-restarts", "0", *flags], tmp_path))
        return servers[-1]

    yield serve
    for server in servers:
        processes = [*server.children(), *server.worker_pids()] if server.url and server.process.poll() is None else []
        server.stop()
        server.until(lambda pids=processes: not any(map(alive, pids)))
        assert server.leftovers() == []
    assert shared_memory() == before


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


@contextlib.contextmanager
def stream(server: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream after its first event."""
    body = BODY | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith('data: {"id"')
        yield lines


def last_error(lines: Iterator[str]) -> str:
    """The message of the error that ends a stream."""
    *_, last = lines
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "engine_failed"
    return str(error["message"])


def assert_failed(server: Any, reason: str) -> None:
    """Check that /health reports a dead engine and new requests are refused; then stop the server."""
    health = httpx.get(f"{server.url}/health", timeout=30)
    assert (health.status_code, health.json()["level"]) == (503, "process")
    assert reason in health.json()["reason"]
    assert "since" in health.json()
    refused = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
    assert server.stop() == 1


def test_a_worker_killed_at_start_is_named(start: Start) -> None:
    server = start("--attention", "faulty", "--attention-option", "at=start", "--attention-option", "do=kill")
    assert server.process.returncode == 2
    assert "the worker of rank 0" in server.errors
    assert "was killed by SIGKILL" in server.errors
    assert "Traceback" not in server.errors


@pytest.mark.parametrize("executor", ["uniproc", "multiproc"])
def test_a_plugin_that_fails_at_start_is_named(start: Start, executor: str) -> None:
    flags = ["--attention", "faulty", "--attention-option", "at=start", "--attention-option", "do=bug"]
    server = start("--executor", executor, *flags)
    assert server.process.returncode == 2
    message = "attention 'faulty' of faulty 1.0 failed in its constructor: KeyError: 'tide' ("
    assert [message in line for line in server.errors.splitlines() if line.startswith("error: ")] == [True]
    assert server.errors.count("in _fault") == 1  # the traceback


HELD = "the exit of this process is held up by hold_up() ("
"""Begins the line of the log that names the function of faulty_plugin.py."""


def test_a_plugin_that_holds_up_the_exit_is_named_and_the_server_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_HOLDS", "exit")
    server = start()
    assert server.stop() == 0
    assert server.errors.count(HELD) == 3  # front end, engine process and main process
    assert "Traceback" not in server.errors


def test_a_hook_that_does_not_return_is_named_and_the_server_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_HOLDS", "hook")
    server = start()
    assert server.stop() == 0
    assert server.errors.count("plugin 'faulty' of faulty 1.0 has been in engine_stopped() for 3 s") == 1
    assert server.errors.count(HELD) == 1  # the engine process


def test_a_plugin_that_holds_up_the_exit_does_not_hide_why_the_server_cannot_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_HOLDS", "exit")
    server = start("--attention", "faulty", "--attention-option", "at=start", "--attention-option", "do=bug")
    assert server.process.returncode == 2
    assert "error: the worker of rank 0 " in server.errors
    assert HELD in server.errors


def test_a_plugin_that_fails_in_a_step_is_named_to_the_client(start: Start) -> None:
    flags = ["--set", "plugins.prefer=faulty", "--attention-option", "at=prefill", "--attention-option", "do=bug"]
    server = start(*flags)
    assert "auto took attention 'faulty' of faulty 1.0, which is not built in" in server.errors
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=30)
    assert answer.status_code == 503
    message = "attention 'faulty' of faulty 1.0 failed in plan(): KeyError: 'tide' (faulty_plugin.py, line "
    assert message in answer.json()["error"]["message"]
    assert_failed(server, message)


def test_a_worker_killed_in_prefill_fails_the_request(start: Start) -> None:
    server = start("--attention", "faulty", "--attention-option", "at=prefill", "--attention-option", "do=kill")
    start_time = time.monotonic()
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=30)
    assert time.monotonic() - start_time < NOTICE_SECONDS
    assert answer.status_code == 503
    assert "the worker of rank 0" in answer.json()["error"]["message"]
    assert_failed(server, "was killed by SIGKILL")


def test_a_worker_killed_in_decode_fails_the_stream(start: Start, alive: Callable[[int], bool]) -> None:
    server = start(*SLOW)
    engine, (worker,) = server.engine_pid(), server.worker_pids()
    with stream(server) as lines:
        os.kill(worker, signal.SIGKILL)
        start_time = time.monotonic()
        assert f"rank 0 (process {worker}) was killed by SIGKILL" in last_error(lines)
        assert time.monotonic() - start_time < NOTICE_SECONDS
    server.until(lambda: not alive(engine), NOTICE_SECONDS)
    assert_failed(server, f"process {worker}")


def test_a_hanging_worker_fails_the_stream_after_step_timeout(start: Start) -> None:
    server = start(*SLOW, "--executor-option", "step_timeout=3")
    with stream(server) as lines:
        os.kill(server.worker_pids()[0], signal.SIGSTOP)
        start_time = time.monotonic()
        assert "took more than 3 s (option step_timeout); the worker of rank 0" in last_error(lines)
        assert 1 < time.monotonic() - start_time < 3 + 2 * NOTICE_SECONDS
    assert_failed(server, "it is stopped (SIGSTOP)")


def test_out_of_memory_in_a_step_fails_the_request_with_advice(start: Start) -> None:
    server = start("--attention", "faulty", "--attention-option", "at=decode", "--attention-option", "do=memory")
    # Not as a stream: the failure may overtake the first token.
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert "failed in step" in message
    assert "OutOfMemoryError: CUDA out of memory" in message
    assert "use a lower --max-batch-tokens" in message
    assert "in _fault" in server.errors  # the worker's traceback
    assert server.errors.count("in _fault") == 1
    assert_failed(server, "OutOfMemoryError")


@pytest.mark.gpu
def test_a_failing_nccl_operation_fails_the_request(start: Start) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; torch sees {torch.cuda.device_count()}")
    flags = ["--attention", "faulty", "--attention-option", "at=decode", "--attention-option", "do=part"]
    server = start("--executor", "tp", "--tp", "2", "--device", "cuda", "--graphs", "off", *flags)
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
    assert answer.status_code == 503
    assert "rank 1 of 2: all_" in answer.json()["error"]["message"]
    assert_failed(server, "rank 1 of 2: all_")


def test_a_killed_front_end_is_replaced_and_a_killed_engine_reported(
    start: Start, alive: Callable[[int], bool]
) -> None:
    server = start(*SLOW)
    engine, (worker,), (front,) = server.engine_pid(), server.worker_pids(), server.front_end_pids()
    with stream(server) as lines:
        os.kill(front, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    server.until(lambda: server.front_end_pids() not in ([], [front]))
    assert httpx.get(f"{server.url}/health", params={"deep": 1}, timeout=30).status_code == 200
    server.until(lambda: server.metrics()['engine_kv_blocks{state="used"}'] == 0)
    with stream(server) as lines:
        os.kill(engine, signal.SIGKILL)
        start_time = time.monotonic()
        assert "was killed by SIGKILL" in last_error(lines)
        assert time.monotonic() - start_time < NOTICE_SECONDS
    server.until(lambda: not alive(worker), NOTICE_SECONDS)
    assert_failed(server, "SIGKILL")


def test_full_shared_memory_is_an_error_without_traceback(start: Start) -> None:
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    private = ("unshare", "--mount", "sh", "-c", mount, "sh")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*private, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not mount a file system of its own")
    server = start(before=private)
    assert server.process.returncode == 2
    assert "/dev/shm" in server.errors
    assert "Traceback" not in server.errors


def test_sigterm_leaves_no_processes(start: Start, alive: Callable[[int], bool]) -> None:
    server = start()
    (worker,) = server.worker_pids()
    assert httpx.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 3}, timeout=30).status_code == 200
    assert httpx.get(f"{server.url}/health", params={"deep": 1}, timeout=30).json()["status"] == "ok"
    assert server.stop() == 0
    assert not alive(worker)
    assert "Traceback" not in server.errors
    assert "killed" not in server.errors
