"""The running server that a profile is of: its address and its processes."""

from __future__ import annotations

import ipaddress
import os
import urllib.parse
from typing import Annotated

import typer

from engine.cli.http_client import split_url
from engine.cli.options import ADMIN_KEY_VARIABLE
from engine.cli.processes import Process, family, find_supervisor
from engine.core.errors import ConfigError

Url = Annotated[str, typer.Option(help="Address of a running server, as http://127.0.0.1:8000.", show_default=False)]
Pid = Annotated[
    int,
    typer.Option(
        help="Process ID of a running server, found by the port of --url if that is on this machine.",
        show_default=False,
        min=0,
    ),
]
AdminKey = Annotated[
    str, typer.Option(help=f"With --url: the server's admin key; better give it in {ADMIN_KEY_VARIABLE}.")
]

PTRACE_ADVICE = (
    "run the command as the server's user and set kernel.yama.ptrace_scope to 0 (sysctl), or run it as root; in a"
    " container, add the capability SYS_PTRACE"
)
"""What to do where this user may not trace the server's processes."""


def processes_of(url: str, pid: int) -> list[Process]:
    """The processes of a running server on this machine. Raises ConfigError."""
    if not pid:
        pid = find_supervisor(_local_port(url))
    processes = family(pid)
    if not processes:
        raise ConfigError(f"there is no process {pid}; give the server's as --pid")
    if len(processes) == 1:  # any Python process may be looked at
        return [Process(pid, "process")]
    return [one for one in processes if one.role.partition(" ")[0] != "helper"]


def is_local(url: str) -> bool:
    """Whether an address is one of this machine."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return host in ("localhost", os.uname().nodename) or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _local_port(url: str) -> int:
    """The port of an address of this machine. Raises InvalidRequestError for what is no URL, else ConfigError."""
    if not url:
        raise ConfigError("no server is named; give --url (as http://127.0.0.1:8000) or --pid")
    parts = split_url(url)
    if not is_local(url):
        raise ConfigError(f"{url} is not on this machine; run the command there, or give the process ID as --pid")
    return parts.port or {"http": 80, "https": 443}[parts.scheme]
