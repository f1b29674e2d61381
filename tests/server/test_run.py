from __future__ import annotations

import subprocess
import sys

import pytest

from engine import server
from engine.core.config.tree import EngineConfig
from engine.core.errors import ConfigError


def test_missing_packages_are_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "find_spec", lambda name: None if name == "zmq" else object())
    with pytest.raises(ConfigError, match=r"serving needs zmq; .*pip install 'fastapi.*'pyzmq"):
        server.run(EngineConfig())


def test_importing_the_package_imports_no_heavy_modules() -> None:
    code = "import sys, engine.server; print([m for m in ('torch', 'fastapi', 'zmq', 'msgspec') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
