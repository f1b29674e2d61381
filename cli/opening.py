"""Finds the model of a command, and starts the engine of a command without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from engine.core.collector import paused
from engine.core.config import Resolved

if TYPE_CHECKING:
    from engine.core.engine import Engine


def open_engine(resolved: Resolved, *, live: bool = True) -> Engine:
    """Make the engine, showing the progress on a terminal. Raises what Engine raises.

    live: whether to update one line of the terminal; False: print lines for a download, and nothing else.
    """
    with paused():
        from engine.core.engine import Engine
        from engine.core.startup_display import show_startup

    with show_startup(lines=False, live=live) as listener:
        return Engine(config=resolved.config, on_progress=listener)


def located(resolved: Resolved, *, config_only: bool = False) -> Resolved:
    """The settings with names on the hub replaced by directories; downloads the files that are missing there.

    config_only: only config.json and its like are needed. Raises what `engine.core.hub.locate` raises, and before any
    download what `engine.core.plugin_host.check_names` raises.
    """
    from engine.core.hub import locate, locate_speculator
    from engine.core.plugin_host import check_names, load_plugins
    from engine.core.startup_display import show_startup

    check_names(resolved.config, load_plugins(resolved.config.plugins, quiet=True))
    with show_startup(lines=False, prefix="") as listener:
        speculator = locate_speculator(resolved.config, listener, config_only=config_only)
        model = locate(resolved.config.model, listener, config_only=config_only)
    return attrs.evolve(resolved, config=attrs.evolve(resolved.config, model=model, speculator=speculator))
