"""Runs each case of a benchmark in a process of its own, so that none inherits another's memory or compiled kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from engine.core.errors import EngineError


def run_in_own_process(script: str, options: Sequence[str]) -> dict[str, Any]:
    """Run a script that ends with `print_result`; what that printed, or {"refused": message}."""
    done = subprocess.run([sys.executable, script, *options], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"refused": f"the process ended with status {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def print_result(measure: Callable[[], dict[str, Any]]) -> None:
    """Print what `measure` returns as JSON; {"refused": message} if the engine refuses the case."""
    try:
        result = measure()
    except EngineError as error:
        result = {"refused": str(error)}
    print(json.dumps(result))
