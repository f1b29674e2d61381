"""`engine profile trace` of an offline load, and what it says when it cannot ask a server."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from engine.cli.profile import trace


def test_an_offline_load_is_recorded(run: Any, engine_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.trace.json.gz"
    result = run(
        *("profile", "trace", str(engine_checkpoint), "--steps", "3", "--after", "2", "--batch", "2"),
        *("--input-len", "20", "--output", str(file), "--kv-memory", "8MiB", "--device", "cpu", "--threads", "1"),
    )
    assert result.exit_code == 0, result.output
    assert "3 steps of 2 processes (engine, rank 0)" in result.stdout
    names = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"decode 2", "schedule"} <= names


def test_settings_of_the_engine_are_refused_for_a_running_server(run: Any) -> None:
    result = run("profile", "trace", "--url", "http://localhost:1", "--max-running", "3")
    assert result.exit_code == 2
    assert "scheduler.max_running (by --max-running) is a setting of the server" in result.stderr


def test_a_server_that_does_not_answer_is_reported(run: Any, monkeypatch: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(trace.urllib.request, "urlopen", refuse)
    result = run("profile", "trace", "--url", "http://localhost:1")
    assert (result.exit_code, result.stderr) == (1, "error: no answer from http://localhost:1: refused\n")
