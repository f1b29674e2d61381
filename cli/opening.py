"""Starts the engine of a command without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.config import Resolved

if TYPE_CHECKING:
    from engine.core.engine import Engine


def open_engine(resolved: Resolved) -> Engine:
    """Make the engine, showing the progress on a terminal. Raises what Engine raises."""
    from engine.core.engine import Engine
    from engine.core.startup_display import show_startup

    with show_startup(lines=False) as listener:
        return Engine(config=resolved.config, on_progress=listener)
