"""Profiles by layer that front ends ask for: the calls start_layer_profile and stop_layer_profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from engine.core.errors import ControlError
from engine.core.profiling import stop_layers

if TYPE_CHECKING:
    from engine.core.engine import Engine


def start_layer_profile(engine: Engine, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Begin to record; arguments: steps. Raises ControlError."""
    steps, most = arguments["steps"], engine.config.server.profile_max_steps
    if not 1 <= steps <= most:
        raise ControlError(f"steps is {steps}; from 1 to {most} are recorded (server.profile_max_steps)")
    engine.call("start_layers", {"steps": steps})
    return _clock(engine)


def stop_layer_profile(engine: Engine, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """End the recording; return all ranks' times. Raises ControlError."""
    clock, peaks = _clock(engine), engine.stats().peaks
    ranks = stop_layers(engine.call)
    return {
        **clock,
        "ranks": msgspec.to_builtins(ranks),
        "peaks": None if peaks is None else attrs.asdict(peaks),
    }


def _clock(engine: Engine) -> dict[str, Any]:
    """Number and seconds of all steps so far that the engine has measured."""
    work = engine.stats().work
    return {"steps": sum(kind.steps for kind in work), "seconds": sum(kind.seconds for kind in work)}
