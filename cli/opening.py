"""The engine of a command that serves nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.config import Resolved

if TYPE_CHECKING:
    from engine.core.engine import Engine


def open_engine(resolved: Resolved) -> Engine:
    """Make it; a terminal shows meanwhile how far it is. Raises what Engine raises."""
    from engine.core.engine import Engine
    from engine.core.startup_display import show_startup

    with show_startup(lines=False) as listener:
        return Engine(config=resolved.config, on_progress=listener)
