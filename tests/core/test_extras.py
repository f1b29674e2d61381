from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from engine.core import extras
from engine.core.grammars import GrammarBackend
from engine.plugins.grammars.llguidance import LLGuidance
from engine.plugins.grammars.xgrammar import XGrammar

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("extra", ["server", "plot", "ray", "triton", "flashinfer"])
def test_the_packages_of_an_extra_are_named_themselves(extra: str) -> None:
    assert extras.install_command(extra).split()[:2] == ["pip", "install"]
    named = extras.install_command(extra).split()[2:]
    assert named == [f"'{one}'" for one in PROJECT["optional-dependencies"][extra]]


def test_a_checkout_that_is_not_installed_installs_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", missing)
    assert extras.install_command("ray") == "pip install -e '.[ray]' in the checkout"
    assert extras.install_command_of("llguidance") == "pip install -e . in the checkout"


def test_a_package_that_the_engine_needs_has_the_bounds_of_pyproject() -> None:
    [named] = [one for one in PROJECT["dependencies"] if one.startswith("llguidance")]
    assert extras.install_command_of("llguidance") == f"pip install '{named}'"


@pytest.mark.parametrize(
    ("backend", "command"),
    [(LLGuidance, extras.install_command_of("llguidance")), (XGrammar, extras.install_command("xgrammar"))],
    ids=["llguidance", "xgrammar"],
)
def test_grammar_backends_refuse_with_the_bounds_of_pyproject_when_their_library_is_missing(
    backend: type[GrammarBackend[Any]], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[backend.__module__], "find_spec", lambda name: None)
    assert f"`{command}`" in (backend.refuses() or "")
