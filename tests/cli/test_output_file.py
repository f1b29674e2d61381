"""Options that name a file to write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

COMMANDS = {
    "--json": (["bench", "throughput"], ["bench", "latency"], ["bench", "serve"], ["bench", "startup"]),
    "--trace": (["bench", "latency", "--profile"],),
    "--csv": (["profile", "layers"],),
    "--output": (["profile", "flame"], ["profile", "trace"]),
}


@pytest.mark.parametrize(
    ("option", "command"),
    [(option, command) for option, commands in COMMANDS.items() for command in commands],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_file_that_cannot_be_written_is_refused_before_the_command_runs(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, command: list[str]
) -> None:
    def refused(path: Path, why: str) -> None:
        # No model is there, so that a command which ran would end with another error.
        result = run(*command, *(["--model", str(tmp_path)] if command[-1] != "flame" else []), option, str(path))
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"error: {option} {path}")
        assert why in result.stderr

    refused(tmp_path / "no" / "x", f"the directory {tmp_path / 'no'} does not exist")
    refused(tmp_path, "is a directory; give a file in it")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(tmp_path / "x", "may not be written by this user")
