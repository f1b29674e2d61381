"""Imports the public names of a package on first use, so that importing a contract does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def exports(
    package: str, **modules: tuple[str, ...]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package that imports its public names lazily.

    package: the package's `__name__`. modules: by module of the package, the names that the package exports. The
    package imports the same names under `if TYPE_CHECKING`, for type checkers and editors; a test compares the two.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def getattribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    public = sorted(homes)
    return getattribute, lambda: public, public
