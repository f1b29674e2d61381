"""Packages that import their names on first use: what `dir` shows, and that each name of it is there."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LAZY = sorted(
    "engine." + ".".join(file.parent.relative_to(ROOT).parts)
    for package in ("cli", "core", "ops", "plugins", "quantize", "server", "testing")
    for file in (ROOT / package).rglob("__init__.py")
    if "exports(" in file.read_text(encoding="utf-8")
)


def test_lazy_packages_are_found() -> None:
    assert {"engine.core", "engine.core.weights", "engine.core.config"} <= set(LAZY)


@pytest.mark.parametrize("name", LAZY)
def test_dir_shows_names_modules_and_what_every_module_has(name: str) -> None:
    package = import_module(name)
    shown = dir(package)
    folder = Path(package.__path__[0])
    modules = {file.stem for file in folder.glob("*.py")} | {file.parent.name for file in folder.glob("*/__init__.py")}
    assert {*package.__all__, "__name__", "__doc__", "__file__"} <= set(shown)
    assert {module for module in modules if not module.startswith("_")} <= set(shown)
    for module in modules - {"__init__", "__main__"}:
        assert find_spec(f"{name}.{module}")
    assert shown == sorted(set(shown))
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = package.nothing


def test_a_module_that_dir_shows_is_imported_on_first_use() -> None:
    code = "import engine.core, sys; print(engine.core.config.tree.EngineConfig.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["EngineConfig", "False"]
