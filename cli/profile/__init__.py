"""`engine profile`: where the time and the memory of a server or of an offline load go.

A subcommand is a function in a module of its own, registered here by `app.command()(module.function)`. `engine profile`
alone imports all of these modules, so they import torch and the server's packages inside their functions.
"""

from __future__ import annotations

import typer

from engine.cli.profile import allocations, flame, layers, phases, stacks, syscalls, trace

app = typer.Typer(help="See where time and memory go.", no_args_is_help=True, callback=lambda: None)
app.command()(trace.trace)
app.command()(layers.layers)
app.command()(phases.phases)
app.command()(flame.flame)
app.command()(stacks.stacks)
app.command()(syscalls.syscalls)
app.command()(allocations.allocations)
