"""`engine profile`: where the time of each step and of each request goes."""

from __future__ import annotations

import typer

from engine.cli.profile import allocations, flame, phases, stacks, syscalls

app = typer.Typer(help="Show where the time of each step goes.", no_args_is_help=True)
app.command()(phases.phases)
app.command()(flame.flame)
app.command()(stacks.stacks)
app.command()(syscalls.syscalls)
app.command()(allocations.allocations)
