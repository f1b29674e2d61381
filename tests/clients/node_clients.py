"""Runs the clients for Node.js."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import HERE, ROOT, Server

NODE = Path(os.environ.get("CLIENTS_NODE", ROOT / "build" / "clients" / "node"))
"""The directory with the packages of package.json."""


def version(package: str) -> str:
    """The version of an installed package."""
    return str(json.loads((NODE / "node_modules" / package / "package.json").read_text())["version"])


def command(name: str) -> Path:
    """A command that a package has installed."""
    return NODE / "node_modules" / ".bin" / name


def runner(script: str) -> Callable[..., Any]:
    """Calls a function of a script of `node`, and returns what it printed."""
    for file in (HERE / "node").glob("*.mjs"):  # next to the packages, where Node.js looks for them
        shutil.copy(file, NODE)

    def run(what: str, server: Server, prompt: str) -> Any:
        asked = {"what": what, "base": server.v1, "model": server.model, "prompt": prompt}
        arguments = ["node", str(NODE / script), json.dumps(asked)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.fail(f"{script} {what} failed:\n{done.stderr}", pytrace=False)
        return json.loads(done.stdout.splitlines()[-1])  # the lines before are warnings

    return run
