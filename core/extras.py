"""Optional packages: how to install those that a part of the engine lacks."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires

DISTRIBUTION = "pluggable-llm-engine"


def install_command(extra: str) -> str:
    """The pip command for the packages of an extra in pyproject.toml, by their own names.

    A package index may have the engine itself under that name, in another version or not at all.
    """
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # a checkout on the path that was never installed
        return f"pip install -e '.[{extra}]' in the checkout"
    found = [line.partition(";") for line in lines]
    names = [
        name.strip() for name, _, marker in found if marker.replace("'", '"').split() == ["extra", "==", f'"{extra}"']
    ]
    return " ".join(["pip install", *(f"'{name}'" for name in names)])
