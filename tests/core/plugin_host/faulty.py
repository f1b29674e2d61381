"""Plugins for tests of what happens when one is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.core.hooks import hookimpl


class Odd(BaseException):
    """Outside Exception."""


class UnreadableError(Exception):
    """Without a text."""

    def __str__(self) -> str:
        raise ValueError("no text")


def raising(error: BaseException | None = None) -> Callable[..., Any]:
    """A method that raises."""

    def call(*arguments: Any, **named: Any) -> Any:
        raise (error or KeyError("tide")).with_traceback(None)

    return call


def offering(section: str, cls: type, *, preference: int = 0) -> Any:
    """A plugin that registers `cls` as 'mine' for a section of the configuration."""
    hook = {"scheduler": "schedulers", "executor": "executors", "model": "models"}.get(section, section)

    def register(register: Any) -> None:
        register("mine", lambda: cls, api=getattr(cls, "api", "1"), summary="", preference=preference)

    register.__name__ = f"register_{hook}"
    return type("Plugin", (), {register.__name__: staticmethod(hookimpl(register))})()
