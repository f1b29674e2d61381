"""The check of options whose number must be above 0, made before the command runs."""

from __future__ import annotations

import math

import typer

from engine.core.errors import ConfigError


def positive_number(param: typer.CallbackParam, value: float | None) -> float | None:
    """An option's callback: return the value, or raise ConfigError if it is not above 0 and finite. None: not given."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{param.opts[0]} {value:g} is not above 0 and finite; give another number")
    return value
