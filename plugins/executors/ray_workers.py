"""All Ray actors of an executor, seen from its process: calls return their results, progress, errors and exits."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import ray
from attrs import define, field
from ray.exceptions import RayActorError, RayError, RayTaskError

from engine.core.errors import EngineError, ExecutorError
from engine.core.executors import Answer, MessageDecoder, encode
from engine.core.startup import Listener
from engine.core.types import CacheInfo
from engine.plugins.executors.control_messages import Failed, FromWorker, Progressed, Ready
from engine.plugins.executors.ray_actor import ActorLaunch, ActorLocation

ROOT_CAUSE_SECONDS = 1.0
"""With several workers, delay before a worker's error is raised: another worker's exit may have caused it."""
STACK_SECONDS = 3.0
"""Time for hung actors to return their stacks."""
STOP_SECONDS = 5.0
"""Time for Ray to kill the actors."""
DETAIL = re.compile(r"\t(class_name|actor_id|pid|name|namespace|ip): ")
"""Line of Ray's error messages that repeats what our message says."""

log = logging.getLogger(__name__)


@define(eq=False)
class RayWorker:
    """One actor, from the executor's side."""

    rank: int
    actor: Any
    location: ActorLocation | None = None
    """Unknown until Ray has started the actor."""
    phase: str = "start"
    """Current phase of the start; empty once the worker is ready."""
    event: Any = None
    """The call that returns the actor's next message, or fails when the actor dies."""

    def listen(self) -> None:
        """Begin the call for the next message."""
        self.event = self.actor.listen.remote()

    def __str__(self) -> str:
        if self.location is None:
            return f"the worker of rank {self.rank}"
        return f"the worker of rank {self.rank} (process {self.location.process} on node {self.location.host})"


@define
class _InFlightStep:
    """A step that was sent to all actors."""

    step: int
    results: list[Any]
    """The calls that return each rank's result."""
    oldest_since: float = field(factory=time.monotonic)
    """Since when the step is the oldest in-flight one, time.monotonic()."""


class RayWorkers:
    """The actors of one executor. If one fails, all are killed. Not thread-safe."""

    def __init__(self, actors: Sequence[Any], step_timeout: float) -> None:
        self.failure: EngineError | None = None
        """Why no step can run any more."""
        self.workers = [RayWorker(rank, actor) for rank, actor in enumerate(actors)]
        """By rank."""
        self._step_timeout = step_timeout
        self._num_steps = 0
        self._in_flight: deque[_InFlightStep] = deque()
        self._decoder: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)

    def locate(self, timeout: float) -> list[ActorLocation]:
        """Wait until Ray has started all actors; return their locations, by rank. The ranks meet at rank 0's node."""
        decoder: MessageDecoder[ActorLocation] = MessageDecoder(ActorLocation)
        several = len(self.workers) > 1
        calls = [worker.actor.locate.remote(several and worker.rank == 0) for worker in self.workers]
        until = time.monotonic() + timeout
        locations = []
        for worker, call in zip(self.workers, calls, strict=True):
            if not _finished([call], max(0.0, until - time.monotonic())):
                message = f"Ray has not started {worker} within {timeout:g} s (option placement_timeout)"
                raise ExecutorError(f"{message}; the logs of its node say why")
            worker.location = decoder.decode(self._startup_result(worker, call))
            locations.append(worker.location)
        return locations

    def start(self, launches: Sequence[ActorLaunch], listener: Listener | None) -> list[CacheInfo]:
        """Start the model and wait until all actors are ready; return their cache infos, by rank. Raises the first
        error."""
        begun = [
            worker.actor.begin.remote(encode(launch)) for worker, launch in zip(self.workers, launches, strict=True)
        ]
        for worker, call in zip(self.workers, begun, strict=True):
            self._startup_result(worker, call)
            worker.listen()
        caches: dict[int, CacheInfo] = {}
        while len(caches) < len(self.workers):
            for worker in self._with_event(_finished(self._events(), None, 1)):
                match self._receive(worker):
                    case Progressed(progress):
                        worker.phase = progress.phase
                        if listener is not None:
                            listener(progress)
                    case Ready(cache):
                        worker.phase = ""
                        caches[worker.rank] = cache
        return [caches[worker.rank] for worker in self.workers]

    def submit(self, step: int, data: bytes) -> None:
        """Send a step to all actors."""
        self._in_flight.append(_InFlightStep(step, self._send(data)))

    def call(self, name: str, data: bytes) -> list[bytes]:
        """Send a control call to all actors and wait for all answers; no step is in flight. Returns them by rank.

        Raises ExecutorError if an actor fails or the call takes longer than a step may.
        """
        calls = self._send(data)
        waiting, until = calls, time.monotonic() + self._step_timeout
        while waiting:
            if self.failure is not None:
                raise ExecutorError(str(self.failure))
            finished = _finished([*waiting, *self._events()], max(0.0, until - time.monotonic()), 1)
            for worker in self._with_event(finished):
                self._receive(worker)
            if not finished:
                self._fail(self._hung_error(f"the control call {name}", calls))
            waiting = [one for one in waiting if one not in finished]
        answers = []
        for worker, one in zip(self.workers, calls, strict=True):
            try:
                answers.append(ray.get(one))
            except RayError as error:
                self._fail(self._death(worker, error))
        return answers

    def _send(self, data: bytes) -> list[Any]:
        """Send a step or a control call to all actors; returns the calls that return the results, by rank."""
        calls = [worker.actor.step.remote(self._num_steps, data) for worker in self.workers]
        self._num_steps += 1
        return calls

    def ready(self) -> bool:
        """Whether `collect` returns without waiting."""
        return self.failure is not None or bool(_finished([self._in_flight[0].results[0]], 0.0))

    def collect(self) -> bytes:
        """Wait for rank 0's result of the oldest step. Raises ExecutorError if an actor fails or the step hangs."""
        oldest = self._in_flight[0]
        first = oldest.results[0]
        while True:
            if self.failure is not None:
                raise ExecutorError(str(self.failure))
            left = oldest.oldest_since + self._step_timeout - time.monotonic()
            finished = _finished([first, *self._events()], max(0.0, left), 1)
            if first in finished:
                break
            for worker in self._with_event(finished):
                self._receive(worker)
            if not finished:
                self._fail(self._hung_error(f"step {oldest.step}", oldest.results))
        try:
            data: bytes = ray.get(first)
        except RayError as error:
            self._fail(self._death(self.workers[0], error))
        self._in_flight.popleft()
        if self._in_flight:
            self._in_flight[0].oldest_since = time.monotonic()
        return data

    def check(self) -> None:
        """Set `failure` if an actor has failed or died; does not wait."""
        if self.failure is None:
            try:
                for worker in self._with_event(_finished(self._events(), 0.0)):
                    self._receive(worker)
            except EngineError:  # `failure` has the error
                return

    def kill(self) -> None:
        """Kill all actors."""
        for worker in self.workers:
            ray.kill(worker.actor, no_restart=True)

    def wait(self) -> None:
        """Wait until the processes on this node have exited, and until Ray reports the exit of the others."""
        until = time.monotonic() + STOP_SECONDS
        _finished([event for event in self._events() if event is not None], STOP_SECONDS)
        node = ray.get_runtime_context().get_node_id()
        located = [(worker, worker.location) for worker in self.workers if worker.location is not None]
        near = [(worker, location.process) for worker, location in located if location.node == node]
        while near := [(worker, process) for worker, process in near if Path(f"/proc/{process}").exists()]:
            if time.monotonic() > until:
                log.warning(
                    "Ray has not ended %s within %g s", ", ".join(str(worker) for worker, _ in near), STOP_SECONDS
                )
                return
            time.sleep(0.01)

    def _startup_result(self, worker: RayWorker, call: Any) -> Any:
        """Return the result of a call made before the model is loaded. Raises ExecutorError if it failed."""
        try:
            return ray.get(call)
        except RayError as error:
            if not _is_python_error(error):
                raise self._death(worker, error) from error
            log.error("%s could not be started\n%s", worker, error)
            raise ExecutorError(
                f"{worker} could not be started: {_reason(error)}; all nodes must have the engine in the same Python "
                "environment"
            ) from error

    def _events(self) -> list[Any]:
        """The calls that return the actors' next messages."""
        return [worker.event for worker in self.workers]

    def _with_event(self, finished: list[Any]) -> list[RayWorker]:
        """The actors whose message or death is among the finished calls."""
        return [worker for worker in self.workers if worker.event in finished]

    def _receive(self, worker: RayWorker) -> Progressed | Ready | Answer:
        """Return an actor's message. Raises the error that the actor reports, or ExecutorError if the actor died."""
        try:
            message = self._decoder.decode(ray.get(worker.event))
        except RayError as error:
            self._fail(self._death(worker, error))
        worker.listen()
        if isinstance(message, Failed):
            if message.unexpected:
                log.error("%s failed in %s\n%s", worker, message.phase, message.traceback.rstrip())
            self._fail(self._death_of_another(worker) or message.error(str(worker)))
        return message

    def _death_of_another(self, worker: RayWorker) -> EngineError | None:
        """The error for another actor that died at about the time this one failed; None if no other died."""
        others = [other for other in self.workers if other is not worker]
        until = time.monotonic() + ROOT_CAUSE_SECONDS
        while others and (left := until - time.monotonic()) > 0:
            finished = _finished([other.event for other in others], left, 1)
            for other in [other for other in others if other.event in finished]:
                try:
                    ray.get(other.event)
                except RayError as error:
                    return self._death(other, error)
                other.listen()
        return None

    def _death(self, worker: RayWorker, error: RayError) -> EngineError:
        """Log the death of an actor and return the error for it."""
        place = f" in {worker.phase}" if worker.phase else ""
        if not place and self._in_flight:
            place = f" in step {self._in_flight[0].step}"
        log.error("%s died%s\n%s", worker, place, error)
        return ExecutorError(f"{worker} died{place}: {_reason(error)}")

    def _hung_error(self, what: str, calls: list[Any]) -> EngineError:
        """Log the stacks of the late actors; return an error with the stack of the one that is furthest behind.

        what: the step or the control call that hangs. calls: those that return each rank's result.
        """
        finished = _finished(calls, 0.0)
        late = [worker for worker, call in zip(self.workers, calls, strict=True) if call not in finished]
        requests = {worker.rank: worker.actor.stack.remote() for worker in late}
        answered = _finished(list(requests.values()), STACK_SECONDS)
        places: list[tuple[int, str]] = []
        for worker in late:
            begun, stack, dump = -1, "", ""
            if requests[worker.rank] in answered:
                try:
                    begun, stack, dump = ray.get(requests[worker.rank])
                except RayActorError as error:
                    return self._death(worker, error)
            log.error("%s has not finished %s\n%s", worker, what, dump.rstrip())
            stack = stack or "it gives no stack: it is stopped, or holds Python's lock"
            places.append((begun, f"{worker}: {stack}"))
        place = min(places)[1] if places else "all workers have finished it"
        took = f"{what} took more than {self._step_timeout:g} s (option step_timeout)"
        return ExecutorError(f"{took}; {place}")

    def _fail(self, error: EngineError) -> NoReturn:
        """Record why no step can run any more, kill all actors and raise the error."""
        self.failure = error
        self.kill()
        raise error


def _finished(calls: list[Any], timeout: float | None, count: int | None = None) -> list[Any]:
    """Wait until `count` calls (None: all) have returned or failed, at most `timeout` seconds; return these calls."""
    return ray.wait(calls, num_returns=count or len(calls), timeout=timeout)[0] if calls else []


def _reason(error: RayError) -> str:
    """Ray's message without its guesses about the cause; for an exception in Python, its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not DETAIL.match(line)]
    if _is_python_error(error):
        return lines[-1]
    if len(lines) > 1 and lines[0].startswith("The actor died unexpectedly before"):
        del lines[0]
    return " ".join(lines).partition(" Some common causes")[0]


def _is_python_error(error: RayError) -> bool:
    """Whether the actor raised an exception, rather than died."""
    return isinstance(error, RayTaskError) or (isinstance(error, RayActorError) and error.actor_init_failed)
