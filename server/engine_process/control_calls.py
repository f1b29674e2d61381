"""Runs the control calls of front ends on the engine. A new call is one entry of CALLS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.core.errors import ControlBusyError, ControlError
from engine.server.shared.messages import Control, ControlAnswer

if TYPE_CHECKING:
    from engine.core.engine import Engine

CALLS: Mapping[str, Callable[[Engine, Mapping[str, Any]], Any]] = {
    "reset_prefix_cache": lambda engine, arguments: {"blocks_freed": engine.reset_prefix_cache(**arguments)},
}
"""Name of a call -> what runs it in the loop of the engine process, between two steps, and returns plain data."""


def answer(engine: Engine, message: Control) -> ControlAnswer:
    """Run a control call. What is refused becomes the answer; the error of a failed device or worker is raised."""
    number = message.number
    try:
        return ControlAnswer(number, CALLS[message.name](engine, message.arguments))
    except ControlError as error:
        return ControlAnswer(number, error=str(error), busy=isinstance(error, ControlBusyError))
