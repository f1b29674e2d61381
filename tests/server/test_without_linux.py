"""Serving on a CPU where the kernel is not Linux: no /proc, no /sys, no pidfd, memfd or affinity."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e

LIKE_MACOS = """
import builtins, io, os, sys
for name in ("memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "eventfd", "waitid", "P_PIDFD"):
    if hasattr(os, name):
        delattr(os, name)
os.process_cpu_count = os.cpu_count  # since Python 3.13; where there is no affinity they are the same
def guarded(function):
    def call(path, *arguments, **named):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys/fs", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *arguments, **named)
    return call
builtins.open = io.open = guarded(open)
os.listdir = guarded(os.listdir)
"""


def test_a_cpu_serves_without_what_only_linux_has(
    start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.testing.checkpoints import make_checkpoint

    (tmp_path / "sitecustomize.py").write_text(LIKE_MACOS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    model = make_checkpoint(tmp_path / "tiny", tokenizer=True)
    command = [sys.executable, "-P", "-c", "from engine.cli.main import main; main()", "serve", "--model", str(model)]
    server = start_server([*command, "--port", "0", "--max-len", "64", "--device", "cpu"], tmp_path)
    assert server.url, server.errors
    body = {"model": "tiny", "prompt": "once", "max_tokens": 3, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
    assert server.stop() == 0
    assert "Traceback" not in server.errors
