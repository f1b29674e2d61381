"""The commands of `engine bench`."""

from __future__ import annotations

import typer

from engine.cli.bench import latency, serve, startup, throughput

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
app.command()(throughput.throughput)
app.command()(latency.latency)
app.command()(serve.serve)
app.command()(startup.startup)
