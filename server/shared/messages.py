"""What passes between the server's processes, as msgpack (core/executors/wire.py).

The supervisor starts the others and talks to each over its standard input (server/shared/control.py); front ends
and engine process talk over ZeroMQ, one message each.
"""

from __future__ import annotations

import msgspec

from engine.core.config import EngineConfig
from engine.core.plugin_host import ChosenPlugin
from engine.core.types import CacheInfo, EngineStats, Output, Request, SamplingParams

SOCKET = "engine-{}.{}"
"""The ZeroMQ socket of a replica's engine process, of this life, in the server's directory."""
BOARD = "board"
"""The file of the front ends' numbers (server/shared/metrics.py) there."""


# --- supervisor to engine process ---


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """In the first message to either kind of process."""

    config: EngineConfig
    directory: str
    """The server's own: sockets and shared files."""


class EngineLaunch(Launch, frozen=True, kw_only=True):
    """What an engine process is told at first; the configuration is the one of its replica."""

    replica: int = 0
    life: int = 0
    """How many engine processes this replica has had before."""


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """A front end is dead: forget its requests."""

    name: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Close what there is and exit with 0."""


# --- engine process to supervisor ---


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The engine takes requests. The supervisor passes it on to the front ends."""

    replica: int = 0
    life: int = 0
    cache: CacheInfo
    choices: tuple[ChosenPlugin, ...]
    max_len: int
    """Longest context, tokens."""
    vocab_size: int
    default_params: SamplingParams
    """What a request that says nothing gets."""
    seconds: float
    """How long loading took."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process could not start, or cannot go on; it exits."""

    error: str
    for_good: bool = False
    """Whether it would fail again in the same way: by a setting, or a plugin."""


# --- supervisor to front end ---


class FrontEndLaunch(Launch, frozen=True, kw_only=True):
    """What a front end is told at first."""

    name: str
    """Its ZeroMQ identity, never used again."""
    row: int
    """Its row of the board of numbers."""
    rows: int
    connections: int
    """File descriptor of the socket over which accepted connections come."""
    created: int
    """When the server was started, time.time()."""


class EngineGone(msgspec.Struct, frozen=True, tag="engine gone"):
    """The engine process is dead, and the next one, if there is to be one, takes no requests yet."""

    reason: str
    """What the last one died of."""
    since: float
    """When a replica took its last requests, time.time(), seconds."""
    replica: int = 0
    life: int = 0
    starting: bool = False
    """Whether the next one has begun its `life`."""
    coming: bool = False
    """Whether there is or will be a next one."""
    restart: str = ""
    """What is done about it, in a few words; empty where nothing ever is."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no more work, and say when what runs has ended."""


# --- front end to supervisor ---


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Connections can be passed on."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Nothing runs any more."""


# --- front end to engine process ---


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Here is a front end; send statistics."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Run these requests; in outputs and aborts they go by numbers, `first` and up."""

    first: int
    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; no more outputs are wanted."""

    numbers: tuple[int, ...]


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Somebody wants proof that steps are computed; it comes in the pulse (server/shared/heartbeat.py)."""


# --- engine process to front end ---


class Outputs(msgspec.Struct, frozen=True, array_like=True):
    """Everything one step gave one front end, in columns, so that a token is a number and no object.

    An output of nothing but tokens is a row of the columns; any other, so the first and the last of a request, is in
    `full`. The columns come before `full` where a request is in both.
    """

    numbers: list[int]
    """Of the requests."""
    counts: list[int]
    """How many tokens each has."""
    tokens: list[int]
    """Those of all, one after the other."""
    full: list[tuple[int, Output]]
    """(number of the request, output)."""
    stats: EngineStats | None = None
    """With the last message before the engine goes idle, and a few times a second while it works."""


ToEngine = Gone | Shutdown
FromEngine = Started | Failed
ToFrontEnd = Started | EngineGone | Drain | Shutdown
FromFrontEnd = Ready | Drained | Failed
FromClient = Hello | Add | Abort | Probe
