"""examples/third_party_speculator: a package of one speculator passes its own tests, in less than 80 lines."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).parent.parent / "examples" / "third_party_speculator"


def load(name: str, file: str) -> ModuleType:
    spec = spec_from_file_location(name, SOURCE / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


load("engine_phrases", "src/engine_phrases/__init__.py")
of_package = vars(load("tests_of_engine_phrases", "tests/test_phrases.py"))
# Its tests and their fixture are collected with those of this file, which takes less time than a process of their own.
globals().update(
    {name: of_package[name] for name in of_package if name.startswith(("Test", "test_")) or name == "file"}
)


def test_the_speculator_is_shorter_than_80_lines() -> None:
    [module] = SOURCE.glob("src/*/__init__.py")
    assert len(module.read_text(encoding="utf-8").splitlines()) < 80
