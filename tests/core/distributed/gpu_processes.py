"""Runs a script as each of several ranks, with a GPU each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run_script(script: str, ranks: int, directory: Path) -> None:
    """Run Python code with arguments RANK and a file in `directory` where the ranks meet; it must end without an error.

    Skips the test where there are fewer GPUs than ranks.
    """
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; torch sees {torch.cuda.device_count()}")
    commands = [[sys.executable, "-c", script, str(rank), str(directory / "ranks")] for rank in range(ranks)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
