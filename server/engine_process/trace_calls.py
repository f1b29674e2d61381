"""Records a trace of the engine, its ranks and the front ends for a front end; answers once the trace is written."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.core.config import ServerConfig
from engine.core.errors import ControlError
from engine.core.timeline import TraceOptions
from engine.server.shared.messages import ControlAnswer, Outputs, RecordSpans

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.server.engine_process.output_routes import OutputRoutes

log = logging.getLogger(__name__)

Send = Callable[[bytes, Outputs], None]


class TraceCalls:
    """The calls start_profile and stop_profile of one engine process."""

    def __init__(self, engine: Engine, config: ServerConfig, replica: int, routes: OutputRoutes, send: Send) -> None:
        """send: sends a message to a front end."""
        self._engine = engine
        self._config = config
        self._replica = replica
        self._routes = routes
        self._send = send
        self._numbers = itertools.count(1)
        self._front_ends: list[bytes] = []
        self._directory = ""
        self.started = False
        """Whether a trace was started whose end is not known."""
        self.waiting: list[tuple[bytes, int]] = []
        """(front end, number of the call) of each stop_profile that waits for the trace."""

    def start(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to record; arguments: those of TraceOptions that a client may give. Raises ControlError."""
        config = self._config
        if not config.profile_dir:
            raise ControlError(
                "profiling is off: the server has no directory for traces; start it with --profile-dir DIRECTORY"
            )
        front_ends = self._routes.front_ends()
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"profile-{stamp}-{next(self._numbers)}-replica{self._replica}.trace.json.gz"
        options = TraceOptions(
            path=str(Path(config.profile_dir).absolute() / name),
            others=tuple(map(part_name, front_ends)),
            max_steps=config.profile_max_steps,
            max_seconds=config.profile_max_seconds,
            **arguments,
        )
        self._engine.start_trace(options, self._notify)
        self.started = True
        return {"path": options.path}

    def stop(self, peer: bytes, number: int, *, wait: bool) -> None:
        """End the recording, unless `wait` says to wait for its steps; `poll` answers once the trace is written."""
        if wait:
            self._engine.trace_report()  # raises if there is none
        else:
            self._engine.stop_trace()
        self.waiting.append((peer, number))
        self.started = True

    def poll(self) -> None:
        """End a recording that has lasted too long; answer the calls that wait once the trace is written or failed."""
        try:
            report = self._engine.trace_report()
        except ControlError as error:
            message = str(error)
            if self.started:
                log.warning("the profile failed: %s", message)
            self._answer(lambda number: ControlAnswer(number, error=message))
            return
        if report is not None:
            plain = msgspec.to_builtins(report)
            self._answer(lambda number: ControlAnswer(number, plain))

    def _answer(self, make: Callable[[int], ControlAnswer]) -> None:
        self.started = False
        waiting, self.waiting = self.waiting, []
        for peer, number in waiting:
            self._send(peer, Outputs([], [], [], [], control=[make(number)]))

    def _notify(self, directory: str) -> None:
        """Tell the front ends to record spans for the trace in `directory`; empty: to write those recorded."""
        if directory:
            self._directory, self._front_ends = directory, self._routes.front_ends()
        for peer in self._front_ends:
            message = RecordSpans(self._replica, self._directory, part_name(peer), bool(directory))
            self._send(peer, Outputs([], [], [], [], control=[message]))
        if not directory:
            self._front_ends = []


def part_name(peer: bytes) -> str:
    """Name of a front end's part of a trace."""
    return f"front-end-{peer.decode()}"
