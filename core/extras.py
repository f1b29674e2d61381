"""Optional packages: how to install those that a part of the engine lacks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires

DISTRIBUTION = "pluggable-llm-engine"


def install_command(extra: str) -> str:
    """The pip command for the packages of an extra in pyproject.toml, by their own names.

    A package index may have the engine itself under that name, in another version or not at all.
    """
    requirements = _requirements()
    if requirements is None:
        return f"pip install -e '.[{extra}]' in the checkout"
    return _command(name for name, marker in requirements if marker.split() == ["extra", "==", f'"{extra}"'])


def install_command_of(package: str) -> str:
    """The pip command for a package that the engine itself needs."""
    requirements = _requirements()
    if requirements is None:
        return "pip install -e . in the checkout"
    return _command(name for name, marker in requirements if re.split(r"[^\w.-]", name)[0] == package and not marker)


def _requirements() -> list[tuple[str, str]] | None:
    """Requirement and marker of each package; None for a checkout on the path that was never installed."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return None
    split = [line.partition(";") for line in lines]
    return [(name.strip(), marker.strip().replace("'", '"')) for name, _, marker in split]


def _command(requirements: Iterable[str]) -> str:
    return " ".join(["pip install", *(f"'{one}'" for one in requirements)])
