"""`engine profile`: where the time of each step and of each request goes."""

from __future__ import annotations

import typer

from engine.cli.profile import phases

app = typer.Typer(help="Show where the time of each step goes.", no_args_is_help=True)
app.command()(phases.phases)
