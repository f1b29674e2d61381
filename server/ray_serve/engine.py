"""The deployment `engine`: supervises one engine process, and passes requests and outputs on."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import attrs
from msgspec.structs import replace

from engine.core.config import EngineConfig
from engine.core.executors import MessageDecoder, encode
from engine.core.hub import locate
from engine.core.logs import configure, supervisor_process
from engine.server.front_end.engine_client import EngineClient
from engine.server.front_end.errors import ApiError
from engine.server.front_end.request_group import OutputEvent, RequestGroup
from engine.server.ray_serve.messages import Controlled, Declined, Ended, Produced, ReplicaState, Run, Stop
from engine.server.ray_serve.options import engine_config
from engine.server.shared.heartbeat import Fault
from engine.server.shared.messages import (
    METRICS_FILE,
    Control,
    ControlAnswer,
    EngineDown,
    EngineEvent,
    Outputs,
    Started,
)
from engine.server.shared.metrics_table import MetricsTable
from engine.server.shared.packed_logprobs import PackedLogprobs
from engine.server.supervisor.engines import Engines
from engine.server.supervisor.main import Commands

SHUTDOWN_SECONDS = 5.0
"""Seconds in which the engine process must exit before it is killed."""


class EngineReplica:
    """A replica of the deployment. The model is in a process of its own, which exits with the replica."""

    def __init__(self, config: EngineConfig, command: Sequence[str], name: str) -> None:
        """command: starts an engine process. name: of the replica."""
        self._config = engine_config(config)
        self._name = name
        self._runs: MessageDecoder[Run] = MessageDecoder(Run)
        self._stops: MessageDecoder[Stop] = MessageDecoder(Stop)
        self._controls: MessageDecoder[Control] = MessageDecoder(Control)
        self._groups: dict[str, RequestGroup] = {}
        """The requests of each call in progress, by its ticket."""
        self._directory = tempfile.mkdtemp(prefix="engine-")
        metrics = MetricsTable.map(Path(self._directory) / METRICS_FILE, 1, 1, create=True)
        self._client = EngineClient(self._config, metrics, 0)
        self._link = self._client.links[0]
        self._engines = Engines([self._config], self._directory, command)
        self._started: Started

    async def start(self) -> None:
        """Start the engine process and wait until it accepts requests. Raises EngineError."""
        try:
            (self._started,) = await self._engines.start(self._update)
        except BaseException:
            self._release()
            raise

    async def close(self) -> None:
        """Stop the engine process; there must be no calls in progress."""
        self._engines.drain()
        await self._engines.shutdown(SHUTDOWN_SECONDS)
        self._release()

    async def generate(self, message: bytes) -> AsyncIterator[bytes]:
        """Run the requests of a Run; yields Answers. Cancelling the call aborts the requests that have not finished."""
        run = self._runs.decode(message)
        if (fault := self._fault()) is not None and fault.level == "process":
            yield encode(Declined(self._name, fault.reason))
            return
        request = attrs.evolve(run.request, arrival=time.monotonic())  # the sender's clock may be another machine's
        open_choices = set(range(run.choices))
        try:
            with self._client.submit([request], run.choices) as group:
                self._groups[run.ticket] = group
                while open_choices:
                    for outputs in batches(await group.next(), group.prompt_logprobs):
                        open_choices -= {choice for choice, one in outputs.full if one.finish_reason is not None}
                        yield encode(Produced(outputs))
        except ApiError as error:
            yield encode(Ended(error.status, str(error), error.code))
        finally:
            self._groups.pop(run.ticket, None)

    async def stop(self, message: bytes) -> None:
        """Abort the choices of a Stop."""
        stop = self._stops.decode(message)
        group = self._groups.get(stop.ticket)
        for choice in stop.choices if group is not None else ():
            assert group is not None
            group.abort(choice)

    async def control(self, message: bytes) -> bytes:
        """Run a Control; a Controlled."""
        control = self._controls.decode(message)
        answer = ControlAnswer(control.number)
        try:
            answer = ControlAnswer(control.number, await self._client.control.call(0, control.name, control.arguments))
        except ApiError as error:
            answer = ControlAnswer(control.number, error=error.message, busy=error.code == "busy")
        return encode(Controlled(self._name, answer))

    async def describe(self) -> bytes:
        """The engine's Started."""
        return encode(self._started)

    async def report(self) -> bytes:
        """This replica's ReplicaState."""
        return encode(self._state(self._fault(), None))

    async def probe(self) -> bytes:
        """Make the engine compute a step; this replica's ReplicaState."""
        answer = await self._link.probe(self._config.server.health_timeout)
        return encode(self._state(answer, None) if isinstance(answer, Fault) else self._state(None, answer))

    async def record_routing_stats(self) -> dict[str, int]:
        """For the router: the number of blocks in the prefix cache."""
        return {"blocks": self._started.cache.reusable_indices if self._config.cache.prefix_caching else 0}

    async def check_health(self) -> None:
        """Raise RuntimeError if the replica cannot answer requests; Ray Serve then replaces it."""
        if (fault := self._fault()) is not None:
            raise RuntimeError(f"the engine failed: {fault.reason}")

    def _release(self) -> None:
        self._engines.kill()
        self._client.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _update(self, event: EngineEvent) -> None:
        match event:
            case Started():
                self._client.connect(self._directory, "replica", event)
            case EngineDown():
                self._client.mark_down(event)

    def _fault(self) -> Fault | None:
        return self._link.fault(self._config.server.health_timeout)

    def _state(self, fault: Fault | None, step_seconds: float | None) -> ReplicaState:
        state = ReplicaState(self._name, self._link.stats, step_seconds=step_seconds)
        if fault is None:
            return state
        return replace(state, level=fault.level, reason=fault.reason, since=fault.since)


class EngineDeployment(EngineReplica):
    """An EngineReplica as Ray Serve makes and ends it."""

    async def __init__(self, config: bytes, command: Sequence[str] | None) -> None:  # type: ignore[misc]
        """config: the EngineConfig. command: starts an engine process; None: the usual one. Raises EngineError."""
        from ray import serve

        decoded = MessageDecoder[EngineConfig](EngineConfig).decode(config)
        configure(supervisor_process(), style=decoded.server.log_format, level=decoded.server.log_level)
        decoded = attrs.evolve(decoded, model=await asyncio.to_thread(locate, decoded.model))
        super().__init__(decoded, command or Commands().engine, serve.get_replica_context().replica_tag)
        await self.start()

    async def __del__(self) -> None:
        """Called when the last call has ended."""
        await self.close()


def batches(events: Sequence[OutputEvent], prompt_logprobs: dict[int, tuple[bytes, ...]]) -> Iterator[Outputs]:
    """The events as messages, in order. Within a message, the columns of a choice come before its full outputs.

    prompt_logprobs: RequestGroup's; what is sent is removed.
    """
    outputs = _empty()
    with_full: set[int] = set()
    for choice, tokens, output in events:
        if output is not None:
            if choice in prompt_logprobs:
                outputs.prompt_logprobs.append(PackedLogprobs(choice, prompt_logprobs.pop(choice)))
            outputs.full.append((choice, output))
            with_full.add(choice)
            continue
        if choice in with_full:
            yield outputs
            outputs, with_full = _empty(), set()
        outputs.numbers.append(choice)
        outputs.counts.append(len(tokens))
        outputs.tokens.extend(tokens)
    if outputs.numbers or outputs.full:
        yield outputs


def _empty() -> Outputs:
    return Outputs([], [], [], [], None, [])
