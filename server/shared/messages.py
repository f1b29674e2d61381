"""Messages between the server's processes, encoded as msgpack (core/executors/wire.py).

    message         from            to                when
    --------------  --------------  ----------------  -------------------------------------------------------------
    EngineLaunch    supervisor      engine process    first message to the process
    FrontEndLaunch  supervisor      front end         first message to the process
    Started         engine process  supervisor        the model is loaded; passed on to all front ends
    Ready           front end       supervisor        the front end can answer HTTP
    Failed          either          supervisor        the process cannot start or go on, and exits
    EngineDown      supervisor      front ends        an engine process has exited; again when its successor starts
    FrontEndExited  supervisor      engine processes  a front end has exited
    Hello           front end       engine process    the front end has connected
    Add             front end       engine process    requests were routed to this replica
    Outputs         engine process  front end         after each step with outputs for this front end
    Abort           front end       engine process    client disconnected, stop string found, or draining timed out
    Probe           front end       engine process    GET /health?deep=1
    Control         front end       engine process    a route of administration; answered in an Outputs
    Drain           supervisor      front ends        the server has received SIGTERM or SIGINT
    Drained         front end       supervisor        the last request has been answered or has run out of time
    Shutdown        supervisor      all processes     everything is drained

The supervisor and each of its child processes exchange messages over the child's standard input (supervisor_link.py).
Front ends and engine processes exchange messages over ZeroMQ, one message each. A front end that starts late first
receives the latest Started and EngineDown of each replica. New statistics go to all front ends, in an Outputs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.core.config import EngineConfig
from engine.core.plugin_host import ChosenPlugin
from engine.core.types import CacheInfo, EngineStats, Output, Request, SamplingParams
from engine.server.shared.packed_logprobs import PackedLogprobs

SOCKET = "engine-{}.{}"
"""ZeroMQ socket of an engine process in the server's directory; filled with replica and incarnation."""
METRICS_FILE = "metrics"
"""File of the metrics table (metrics_table.py) in the server's directory."""

LIMITS_FILE = "limits"
"""File of the limits table (limits_table.py) in the server's directory, if there are limits."""


# --- supervisor to engine process ---


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the first message to either kind of process."""

    config: EngineConfig
    directory: str
    """The server's own directory, for sockets and shared files."""


class EngineLaunch(Launch, frozen=True, kw_only=True):
    """First message to an engine process; `config` is that of its replica."""

    replica: int = 0
    incarnation: int = 0
    """Number of engine processes this replica has had before."""


class FrontEndExited(msgspec.Struct, frozen=True, tag="front end exited"):
    """A front end has exited: abort its requests."""

    name: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Release everything and exit with code 0."""


# --- engine process to supervisor ---


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The engine accepts requests. The supervisor passes this message on to the front ends."""

    replica: int = 0
    incarnation: int = 0
    cache: CacheInfo
    choices: tuple[ChosenPlugin, ...]
    """Plugin chosen for each extension point."""
    max_len: int
    """Maximum context length, tokens."""
    vocab_size: int
    default_params: SamplingParams
    """Sampling parameters of a request that sets none."""
    seconds: float
    """Load time."""
    pid: int = 0
    """Process ID of the engine process."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The process could not start or cannot go on, and exits."""

    error: str
    permanent: bool = False
    """Whether a restart would fail in the same way, because of a setting or a plugin."""


# --- supervisor to front end ---


class FrontEndLaunch(Launch, frozen=True, kw_only=True):
    """First message to a front end."""

    name: str
    """ZeroMQ identity; never reused."""
    row: int
    """This front end's row of the metrics table."""
    rows: int
    """Number of rows in the metrics table."""
    connections: int
    """File descriptor of the socket over which accepted connections arrive."""
    created: int
    """Start of the server, time.time()."""
    api_keys: tuple[str, ...] = ()
    """All API keys, those of server.api_key_file included."""


class EngineDown(msgspec.Struct, frozen=True, tag="engine down"):
    """A replica accepts no requests: its engine process has exited, and the next one, if any, has not started yet."""

    reason: str
    """Why the last process exited."""
    since: float
    """When the replica last accepted requests, time.time()."""
    replica: int = 0
    incarnation: int = 0
    starting: bool = False
    """Whether the process of this `incarnation` is loading."""
    will_restart: bool = False
    """Whether another process is loading or will be started."""
    restart: str = ""
    """State of the restart, in a few words; empty if this replica is never restarted."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new requests, and send Drained when all running requests have ended."""


# --- front end to supervisor ---


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The front end accepts connections."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """The front end has no running requests left."""


# --- front end to engine process ---


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A front end has connected; send outputs and statistics to this ZeroMQ identity."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Run `choices` choices of each request, which differ in ID and seed (engine_process/pending_requests.py).

    Outputs and aborts refer to a choice by number: `first`, `first + 1`, ...; those of the first request come first.
    """

    first: int
    requests: tuple[Request, ...]
    choices: int = 1


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort the requests with these numbers."""

    numbers: tuple[int, ...]


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Compute a step; the heartbeat (heartbeat.py) shows when one has completed."""


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Run a control call (engine_process/control_calls.py)."""

    number: int
    """The answer repeats it."""
    name: str
    arguments: dict[str, Any]


# --- engine process to front end ---


class ControlAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """The answer to a Control."""

    number: int
    value: Any = None
    """Plain data."""
    error: str = ""
    """Why the call was refused or failed, in a sentence; empty if it was not."""
    busy: bool = False
    """With `error`: whether the reason is another call in progress."""


class RecordSpans(msgspec.Struct, frozen=True, array_like=True, tag="record"):
    """Record spans for a trace, or write those recorded."""

    replica: int
    directory: str
    """Directory of the trace's parts."""
    name: str
    """Name of this front end's part."""
    begin: bool


class Outputs(msgspec.Struct, frozen=True, array_like=True):
    """One step's outputs for one front end, in columns, so that a token is a number rather than an object.

    An output with nothing but tokens is a row of the columns. Any other output, such as the first and the last of a
    request, is in `full`. Where a request has both, the columns come first.
    """

    numbers: list[int]
    """Request of each row."""
    counts: list[int]
    """Number of tokens in each row."""
    tokens: list[int]
    """Tokens of all rows, concatenated."""
    full: list[tuple[int, Output]]
    """(request number, output)."""
    stats: EngineStats | None = None
    """Set in the last message before the engine goes idle, and a few times per second while the engine is busy."""
    prompt_logprobs: list[PackedLogprobs] = []
    """Prompt log probabilities of the outputs in `full`, which leave them out."""
    control: list[ControlAnswer | RecordSpans] = []
    """Answers to control calls of this front end, and orders to record spans for traces."""


EngineEvent = Started | EngineDown
"""What front ends must know about a replica."""

SupervisorToEngine = FrontEndExited | Shutdown
EngineToSupervisor = Started | Failed
SupervisorToFrontEnd = Started | EngineDown | Drain | Shutdown
FrontEndToSupervisor = Ready | Drained | Failed
FrontEndToEngine = Hello | Add | Abort | Probe | Control
