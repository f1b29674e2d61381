"""`engine profile stacks`: the Python stacks of all processes of a running server now."""

from __future__ import annotations

from typing import Annotated

import typer

from engine.cli.profile.py_spy import dump
from engine.cli.profile.target import Pid, Url, processes_of


def stacks(
    *,
    url: Url = "",
    pid: Pid = 0,
    native: Annotated[
        bool, typer.Option("--native", help="Show frames of C and C++; stops each process for a moment.")
    ] = False,
) -> None:
    """Print the Python stacks of all threads of all processes, by py-spy, of a server that may be stuck too."""
    for process in processes_of(url, pid):
        typer.echo(f"--- {process.role}")
        typer.echo(dump(process, native=native))
