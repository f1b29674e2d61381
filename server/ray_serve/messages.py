"""Messages between a front end and the engine replicas, as msgpack in the arguments and results of Ray's calls."""

from __future__ import annotations

import msgspec

from engine.core.types import EngineStats, Request
from engine.server.shared.heartbeat import Fault, FaultLevel
from engine.server.shared.messages import ControlAnswer, Outputs


class Run(msgspec.Struct, frozen=True):
    """Run `choices` choices of a request; the answer is a stream of Answers, which number the choices from 0."""

    ticket: str
    """Names the call, for Stop."""
    request: Request
    choices: int


class Stop(msgspec.Struct, frozen=True):
    """Abort some choices of a call whose other choices go on."""

    ticket: str
    choices: tuple[int, ...]


class Produced(msgspec.Struct, frozen=True, tag="produced"):
    """New outputs of a call's choices."""

    outputs: Outputs


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The call ends with this error; the fields are those of ApiError."""

    status: int
    message: str
    code: str | None


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """The replica cannot take the request, of which nothing has been computed; another replica may."""

    replica: str
    reason: str


Answer = Produced | Ended | Declined


class Controlled(msgspec.Struct, frozen=True):
    """A replica's answer to a Control."""

    replica: str
    answer: ControlAnswer


class ReplicaState(msgspec.Struct, frozen=True):
    """State of an engine replica."""

    replica: str
    """Ray's id of the replica."""
    stats: EngineStats
    level: FaultLevel | None = None
    """Fields of the replica's Fault; None: it has none."""
    reason: str = ""
    since: float = 0.0
    step_seconds: float | None = None
    """Seconds that a requested step took; None: no step was requested."""

    @property
    def fault(self) -> Fault | None:
        """What is wrong with the replica."""
        return None if self.level is None else Fault(level=self.level, reason=self.reason, since=self.since)
