"""`engine serve`."""

from __future__ import annotations

import typer

from engine.cli.options import configured
from engine.core.config import Resolved


@configured()
def serve(resolved: Resolved) -> None:
    """Answer the OpenAI protocol over HTTP, with the demo model unless --model names another."""
    from engine.server import run

    raise typer.Exit(run(resolved.config))
