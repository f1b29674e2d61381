"""Imports a package's public names and modules on first use, so that importing a contract does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def exports(
    package: str, **modules: tuple[str, ...]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The `__getattr__`, `__dir__` and `__all__` of a package that imports its public names lazily.

    package: the package's `__name__`. modules: by module of the package, the names that the package exports. `dir` also
    shows the package's modules, which are imported on first use too. The package imports the same names under
    `if TYPE_CHECKING`, for type checkers and editors; a test compares the two.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def getattribute(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        if not name.startswith("_") and name in _modules(package):
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *_modules(package)})

    return getattribute, directory, sorted(homes)


def _modules(package: str) -> set[str]:
    """Modules and packages in a package, imported or not."""
    return {found.name for found in iter_modules(sys.modules[package].__path__) if not found.name.startswith("_")}
