"""`engine profile flame`, `stacks` and `syscalls`: what is made of the tools' outputs, and a real process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cli import processes
from engine.cli.processes import Process, thread_cpu_seconds
from engine.cli.profile import py_spy
from engine.cli.profile.flame_page import flame_page
from engine.cli.profile.py_spy import Sampling, failure
from engine.cli.profile.sampled import Sampled, module_of, waits_for
from engine.cli.profile.syscalls import Calls, parse
from engine.cli.profile.target import processes_of
from engine.core.errors import ConfigError, ExecutorError
from engine.core.extras import install_command

RAW = """\
thread (14630): MainThread;<module> (/srv/src/engine/core/engine.py:9);receive (/srv/src/engine/core/shm/ring.py:7) 30
thread (14630): MainThread;<module> (/srv/src/engine/core/engine.py:9);step (/srv/src/engine/core/engine.py:70) 5
thread (14630): MainThread;<module> (/srv/src/engine/core/engine.py:9);step (/srv/src/engine/core/engine.py:71) 5
thread (0x7F33): worker </script>;forward (/usr/lib/python3.12/site-packages/torch/nn/module.py:3);gemm (libx.so) 60
"""


def test_stacks_begin_with_the_thread_and_name_files_from_their_package_on() -> None:
    stacks = Sampled.of(RAW)
    assert stacks.samples == 100
    first = next(iter(stacks.counts))
    assert first == ("MainThread", "<module> (engine/core/engine.py:9)", "receive (engine/core/shm/ring.py:7)")


def test_samples_are_counted_by_function_module_and_wait() -> None:
    stacks = Sampled.of(RAW)
    assert stacks.top()["step (engine/core/engine.py)"] == 10
    assert stacks.modules() == {"engine.core.shm": 30, "engine.core": 10, "libx.so": 60}
    assert stacks.waits() == {"shared memory between processes": 30}


@pytest.mark.parametrize(
    ("frame", "module"),
    [
        ("f (engine/core/runner/step.py:3)", "engine.core.runner"),
        ("f (torch/nn/modules/module.py:3)", "torch"),
        ("run (threading.py:1)", "threading"),
        ("__sched_yield", "native"),
    ],
)
def test_a_frame_belongs_to_its_module(frame: str, module: str) -> None:
    assert module_of(frame) == module


def test_functions_that_wait_are_told_from_those_that_compute() -> None:
    assert waits_for("select (selectors.py:468)") == "sockets"
    assert waits_for("TorchGroup._do (engine/core/distributed/rank_group.py:60)") == "the other ranks"
    assert waits_for("wait (threading.py:320)") == "locks and queues"
    assert waits_for("selected (engine/core/plugin_host/selection.py:3)") == ""


def test_the_page_holds_all_stacks_and_needs_nothing_else() -> None:
    page = flame_page("a title", {"engine": Sampled.of(RAW), "worker 0": Sampled({})})
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    names = data["names"]
    stacks = {(*(names[number] for number in stack[:-1]), stack[-1]) for stack in data["processes"][0]["stacks"]}
    assert stacks == {(*stack, count) for stack, count in Sampled.of(RAW).counts.items()}
    assert [one["name"] for one in data["processes"]] == ["engine", "worker 0"]
    assert len(data["modules"]) == len(data["waits"]) == len(names)
    assert not re.search(r"https?://|src=|href=|import ", page.replace(found[1], ""))


def test_sampling_does_not_pause_processes_unless_it_is_asked_to() -> None:
    options = {"seconds": 3, "rate": 50}
    assert "--nonblocking" in Sampling(**options).options()
    assert "--nonblocking" not in Sampling(pause=True, **options).options()
    assert "--nonblocking" not in Sampling(native=True, **options).options()
    assert "--native" in Sampling(native=True, **options).options()


def test_a_process_that_may_not_be_traced_is_refused_with_the_remedy() -> None:
    process = Process(7, "worker 0")
    refused = failure(process, "Permission Denied: Try running again with elevated permissions by going 'sudo'\n")
    assert isinstance(refused, ConfigError)
    assert re.search(r"worker 0 \(process 7\).*ptrace_scope.*SYS_PTRACE", str(refused))
    other = failure(process, "py-spy> Sampling process\nError: Failed to find python version\n\nStack backtrace:\n")
    assert isinstance(other, ExecutorError)
    assert str(other) == "py-spy failed on worker 0 (process 7): Failed to find python version"


def test_py_spy_is_asked_for_by_its_own_name_when_it_is_missing(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setattr(py_spy.shutil, "which", lambda *_, **__: None)
    done = run("profile", "flame", "--pid", "1")
    assert done.exit_code == 2
    assert install_command("profile") in " ".join(done.stderr.split())


def test_stacks_are_refused_in_a_sentence_when_py_spy_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(py_spy, "find_py_spy", lambda: "py-spy")
    monkeypatch.setattr(py_spy.subprocess, "run", hang)
    with pytest.raises(ExecutorError, match=r"py-spy did not end within 60 s on worker 0 \(process 7\)"):
        py_spy.dump(Process(7, "worker 0"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "no server is named"),
        (["--url", "http://127.0.0.1:9"], "no process of this user listens on port 9"),
        (["--url", "http://example.test:80"], "is not on this machine"),
        (["--url", "nonsense"], "is not the URL of a server"),
        (["--pid", str(2**22 + 1)], "there is no process"),
    ],
)
def test_a_server_that_is_not_found_is_refused(run: Any, options: list[str], error: str) -> None:
    done = run("profile", "stacks", *options)
    assert done.exit_code == 2
    assert error in done.stderr


PROGRAM = """
import sys, threading
def busy_function():
    print("ready", flush=True)
    while True:
        sum(range(1000))
threading.Thread(target=busy_function, name="busy", daemon=True).start()
sys.stdin.read()
"""


@pytest.fixture
def process() -> Iterator[int]:
    """A process with a thread that computes, and one that waits."""
    running = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.readline()
    yield running.pid
    running.communicate(b"")


def test_a_flame_graph_of_a_real_process_shows_the_thread_that_computes(run: Any, process: int, tmp_path: Path) -> None:
    try:
        py_spy.dump(Process(process, "process"))
    except ConfigError as error:
        pytest.skip(str(error))  # not installed, or this user may not trace processes
    file, page = tmp_path / "flame.json", tmp_path / "flame.html"
    options = ["--pid", str(process), "--seconds", "1", "--rate", "20"]
    done = run("profile", "flame", *options, "--output", str(page), "--json", str(file))
    assert done.exit_code == 0, done.stderr
    assert "busy_function" in done.stdout
    assert "busy_function" in page.read_text()
    rows = {(row["metric"], row["case"]): row["value"] for row in json.loads(file.read_text())["rows"]}
    assert rows["samples", "process"] > 0
    done = run("profile", "stacks", "--pid", str(process))
    assert done.exit_code == 0, done.stderr
    assert '"busy"' in done.stdout


SUMMARY = """\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ------------------
 91.70    0.001658           3       500       105 futex
  8.30    0.000150          15        10           epoll_wait
------ ----------- ----------- --------- --------- ------------------
100.00    0.001808           3       510       105 total
"""


def test_system_calls_are_read_from_straces_summary() -> None:
    assert parse(SUMMARY) == {"futex": Calls(500, 105, 0.001658), "epoll_wait": Calls(10, 0, 0.00015)}
    assert parse("") == {}


def test_strace_that_is_missing_is_a_sentence(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cli.profile.syscalls.shutil.which", lambda _: None)
    done = run("profile", "syscalls", "--pid", "1")
    assert done.exit_code == 2
    assert "strace is not installed" in done.stderr


def test_the_listening_process_and_its_threads_are_found(process: int) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = processes_of(f"http://127.0.0.1:{listener.getsockname()[1]}", 0)
    assert found[0].pid in (processes.parent_of(process), threading.main_thread().native_id)
    assert len(thread_cpu_seconds(process)) == 2
    assert thread_cpu_seconds(2**22 + 1) == {}
