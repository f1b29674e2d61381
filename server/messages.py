"""What passes between the HTTP front end and the engine process: one ZeroMQ message each, msgpack (core/wire.py)."""

from __future__ import annotations

import msgspec

from engine.core.config import EngineConfig
from engine.core.selection import Choice
from engine.core.types import CacheInfo, EngineStats, Output, Request, SamplingParams


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The first and only thing on the engine process's standard input."""

    config: EngineConfig
    address: str
    """ZeroMQ address of the front end."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Run these requests."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; no more outputs are wanted."""

    ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Close the engine and exit with 0."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The engine takes requests."""

    cache: CacheInfo
    choices: tuple[Choice, ...]
    max_len: int
    """Longest context, tokens."""
    vocab_size: int
    default_params: SamplingParams
    """What a request that says nothing gets."""
    seconds: float
    """How long loading took."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Everything one step gave."""

    outputs: tuple[Output, ...]
    stats: EngineStats | None = None
    """With the last message before the engine goes idle, and a few times a second while it works."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start, or cannot go on; its process exits."""

    error: str


ToEngine = Add | Abort | Shutdown
FromEngine = Started | Outputs | Failed
