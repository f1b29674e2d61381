"""`engine serve`."""

from __future__ import annotations

import typer

from engine.cli.options import configured
from engine.core.config import Resolved


@configured()
def serve(resolved: Resolved) -> None:
    """Serve the protocols of OpenAI and Anthropic over HTTP, with the demo model unless another is named."""
    from engine.core.collector import paused

    with paused():
        from engine.core.plugin_host import check_names, load_plugins
        from engine.server import run

    # A wrong name is reported here immediately, rather than by an engine process after it has imported torch.
    check_names(resolved.config, load_plugins(resolved.config.plugins, quiet=True))
    raise typer.Exit(run(resolved.config))
