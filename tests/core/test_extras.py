from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from engine.core import extras

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
