"""Runs the control calls of front ends on the engine. A new one is an entry of CALLS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.core.errors import ControlBusyError, ControlError
from engine.server.engine_process.layer_calls import start_layer_profile, stop_layer_profile
from engine.server.shared.messages import Control, ControlAnswer

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.server.engine_process.trace_calls import TraceCalls

CALLS: Mapping[str, Callable[[Engine, Mapping[str, Any]], Any]] = {
    "reset_prefix_cache": lambda engine, arguments: {"blocks_freed": engine.reset_prefix_cache(**arguments)},
    "start_layer_profile": start_layer_profile,
    "stop_layer_profile": stop_layer_profile,
}
"""Name of a call -> what runs it in the loop of the engine process, between two steps, and returns plain data."""


def answer(engine: Engine, traces: TraceCalls, peer: bytes, message: Control) -> ControlAnswer | None:
    """Run a control call of a front end; None: the answer comes later.

    What is refused becomes the answer; the error of a failed device or worker is raised.
    """
    number = message.number
    try:
        if message.name == "start_profile":
            return ControlAnswer(number, traces.start(message.arguments))
        if message.name == "stop_profile":
            traces.stop(peer, number, **message.arguments)
            return None
        return ControlAnswer(number, CALLS[message.name](engine, message.arguments))
    except ControlError as error:
        return ControlAnswer(number, error=str(error), busy=isinstance(error, ControlBusyError))
