"""Options whose number is above 0, checked before the command runs."""

from __future__ import annotations

import math

import typer

from engine.core.errors import ConfigError


def positive_number(param: typer.CallbackParam, value: float | None) -> float | None:
    """The callback of an option: its value, which is refused if it is 0, negative, infinite or not a number."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{param.opts[0]} {value:g} is not above 0 and finite; give another number")
    return value
