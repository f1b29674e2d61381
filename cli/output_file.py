"""Options that name a file to write, checked before the command runs."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from engine.core.errors import ConfigError


def check_file(option: str, path: Path) -> None:
    """Raise ConfigError if no file can be written at this path."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; give a file in it")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: the directory {path.parent} does not exist; create it, or give another file"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path} may not be written by this user; give another file")


def output_file(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """The callback of an option: its path, checked by `check_file`."""
    if path is not None:
        check_file(param.opts[0], path)
    return path
