"""Validators of backend options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import Attribute

from engine.core.errors import near_misses


def one_of(*choices: str) -> Callable[[Any, Attribute[str], str], None]:
    """An attrs validator that accepts these values."""

    def check(_: Any, attribute: Attribute[str], value: str) -> None:
        if value not in choices:
            raise ValueError(f"{attribute.name} = {value!r} is no choice; {near_misses(value, choices)}")

    return check
