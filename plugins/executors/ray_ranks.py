"""All ranks of an executor, seen from its process: Ray actors, whose calls tell of results, errors and deaths."""

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
from engine.core.executors import MessageDecoder, encode
from engine.core.startup import Listener
from engine.core.types import CacheInfo
from engine.plugins.executors.messages import Failed, FromWorker, Progressed, Ready
from engine.plugins.executors.ray_actor import Begin, Whereabouts
from engine.plugins.executors.stacks import busy_stack

LINGER = 1.0
"""Seconds from a worker's error to the verdict, where there are others: one that died may have been its cause."""
STACK_SECONDS = 3.0
"""What those that hang get to tell their stacks."""
STOP_SECONDS = 5.0
"""What Ray gets to end the actors."""
DETAIL = re.compile(r"\t(class_name|actor_id|pid|name|namespace|ip): ")
"""A line of Ray's about an actor that says nothing which is not said already."""

log = logging.getLogger(__name__)


@define(eq=False)
class Rank:
    """One actor."""

    rank: int
    actor: Any
    where: Whereabouts | None = None
    """Unknown until Ray has started it."""
    phase: str = "start"
    """Of its start; empty once it is ready."""
    news: Any = None
    """The call that waits for its next message: it fails when the actor dies."""

    def listen(self) -> None:
        """Wait for the next message."""
        self.news = self.actor.listen.remote()

    def __str__(self) -> str:
        if self.where is None:
            return f"the worker of rank {self.rank}"
        return f"the worker of rank {self.rank} (process {self.where.process} on node {self.where.host})"


@define
class _UnderWay:
    """A step."""

    step: int
    answers: list[Any]
    """The ranks' calls."""
    due: float = field(factory=time.monotonic)
    """When it became the oldest one."""


class Ranks:
    """The actors of one executor. One that fails ends all. Not for several threads at once."""

    def __init__(self, actors: Sequence[Any], step_timeout: float) -> None:
        self.failure: EngineError | None = None
        """Why no step can be run any more."""
        self._ranks = [Rank(rank, actor) for rank, actor in enumerate(actors)]
        self._step_timeout = step_timeout
        self._steps = 0
        self._under_way: deque[_UnderWay] = deque()
        self._decoder: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)

    def place(self, timeout: float) -> list[Whereabouts]:
        """Wait until Ray has started all: where they are, by rank. The ranks meet at the first."""
        decoder: MessageDecoder[Whereabouts] = MessageDecoder(Whereabouts)
        calls = [rank.actor.whereabouts.remote(rank.rank == 0 and len(self._ranks) > 1) for rank in self._ranks]
        until = time.monotonic() + timeout
        for rank, call in zip(self._ranks, calls, strict=True):
            if not _done([call], max(0.0, until - time.monotonic())):
                message = f"Ray has not started {rank} within {timeout:g} s (option placement_timeout)"
                raise ExecutorError(f"{message}; the logs of its node say why")
            rank.where = decoder.decode(self._answer(rank, call))
        return [rank.where for rank in self._ranks if rank.where is not None]

    def start(self, orders: Sequence[Begin], listener: Listener | None) -> list[CacheInfo]:
        """Start the model, and wait until all are ready: what each says, by rank. Raises what the first failed with."""
        begun = [rank.actor.begin.remote(encode(order)) for rank, order in zip(self._ranks, orders, strict=True)]
        for rank, call in zip(self._ranks, begun, strict=True):
            self._answer(rank, call)
            rank.listen()
        caches: dict[int, CacheInfo] = {}
        while len(caches) < len(self._ranks):
            for rank in self._heard(_done([rank.news for rank in self._ranks], None, 1)):
                match self._hear(rank):
                    case Progressed(progress):
                        rank.phase = progress.phase
                        if listener is not None:
                            listener(progress)
                    case Ready(cache):
                        rank.phase = ""
                        caches[rank.rank] = cache
        return [caches[rank.rank] for rank in self._ranks]

    def submit(self, step: int, data: bytes) -> None:
        """Send a step to all."""
        answers = [rank.actor.step.remote(self._steps, data) for rank in self._ranks]
        self._steps += 1
        self._under_way.append(_UnderWay(step, answers))

    def ready(self) -> bool:
        """Whether `collect` returns at once."""
        return self.failure is not None or bool(_done([self._under_way[0].answers[0]], 0.0))

    def collect(self) -> bytes:
        """Wait for rank 0's answer to the oldest step. Raises what ended a rank, or that the step takes too long."""
        oldest = self._under_way[0]
        first = oldest.answers[0]
        while True:
            if self.failure is not None:
                raise ExecutorError(str(self.failure))
            left = oldest.due + self._step_timeout - time.monotonic()
            ended = _done([first, *(rank.news for rank in self._ranks)], max(0.0, left), 1)
            if first in ended:
                break
            for rank in self._heard(ended):
                self._hear(rank)
            if not ended:
                self._fail(self._hung(oldest))
        try:
            data: bytes = ray.get(first)
        except RayError as error:
            self._fail(self._death(self._ranks[0], error))
        self._under_way.popleft()
        if self._under_way:
            self._under_way[0].due = time.monotonic()
        return data

    def check(self) -> None:
        """Look whether one has failed or died, which `failure` says then; does not wait."""
        if self.failure is None:
            try:
                for rank in self._heard(_done([rank.news for rank in self._ranks], 0.0)):
                    self._hear(rank)
            except EngineError:  # it is in `failure`
                return

    def kill(self) -> None:
        """End all."""
        for rank in self._ranks:
            ray.kill(rank.actor, no_restart=True)

    def wait(self) -> None:
        """Wait until those on this node have ended, and Ray knows it of the others."""
        until = time.monotonic() + STOP_SECONDS
        _done([rank.news for rank in self._ranks if rank.news is not None], STOP_SECONDS)
        here = ray.get_runtime_context().get_node_id()
        near = [rank for rank in self._ranks if rank.where is not None and rank.where.node == here]
        while near := [rank for rank in near if rank.where and Path(f"/proc/{rank.where.process}").exists()]:
            if time.monotonic() > until:
                log.warning("Ray has not ended %s within %g s", ", ".join(map(str, near)), STOP_SECONDS)
                return
            time.sleep(0.01)

    def _answer(self, rank: Rank, call: Any) -> Any:
        """Of a call before the model is being loaded."""
        try:
            return ray.get(call)
        except RayError as error:
            if not _of_python(error):
                raise self._death(rank, error) from error
            log.error("%s could not be started\n%s", rank, error)
            raise ExecutorError(
                f"{rank} could not be started: {_reason(error)}; all nodes must have the engine in the same Python "
                "environment"
            ) from error

    def _heard(self, ended: list[Any]) -> list[Rank]:
        """The ranks that have news."""
        return [rank for rank in self._ranks if rank.news in ended]

    def _hear(self, rank: Rank) -> Progressed | Ready | None:
        """Take what a rank says. Raises its error; so does its death."""
        try:
            message = self._decoder.decode(ray.get(rank.news))
        except RayError as error:
            self._fail(self._death(rank, error))
        rank.listen()
        if isinstance(message, Failed):
            if message.unexpected:
                log.error("%s failed in %s\n%s", rank, message.phase, message.traceback.rstrip())
            self._fail(self._death_of_another(rank) or message.error(str(rank)))
        return message

    def _death_of_another(self, rank: Rank) -> EngineError | None:
        """Of a rank that died when this one failed, or just before."""
        others = [other for other in self._ranks if other is not rank]
        until = time.monotonic() + LINGER
        while others and (left := until - time.monotonic()) > 0:
            ended = _done([other.news for other in others], left, 1)
            for other in [other for other in others if other.news in ended]:
                try:
                    ray.get(other.news)
                except RayError as error:
                    return self._death(other, error)
                other.listen()
        return None

    def _death(self, rank: Rank, error: RayError) -> EngineError:
        place = f" in {rank.phase}" if rank.phase else ""
        if not place and self._under_way:
            place = f" in step {self._under_way[0].step}"
        log.error("%s died%s\n%s", rank, place, error)
        return ExecutorError(f"{rank} died{place}: {_reason(error)}")

    def _hung(self, oldest: _UnderWay) -> EngineError:
        """Where the rank is that got least far."""
        answered = _done(oldest.answers, 0.0)
        late = [rank for rank, answer in zip(self._ranks, oldest.answers, strict=True) if answer not in answered]
        asked = {rank.rank: rank.actor.stack.remote() for rank in late}
        told = _done(list(asked.values()), STACK_SECONDS)
        places: list[tuple[int, str]] = []
        for rank in late:
            begun, text = -1, ""
            if asked[rank.rank] in told:
                try:
                    begun, text = ray.get(asked[rank.rank])
                except RayActorError as error:
                    return self._death(rank, error)
            log.error("%s has not finished step %d\n%s", rank, oldest.step, text.rstrip())
            stack = busy_stack(text) or "it gives no stack: it is stopped, or holds Python's lock"
            places.append((begun, f"{rank}: {stack}"))
        place = min(places)[1] if places else "all workers have finished it"
        took = f"step {oldest.step} took more than {self._step_timeout:g} s (option step_timeout)"
        return ExecutorError(f"{took}; {place}")

    def _fail(self, error: EngineError) -> NoReturn:
        """No step can be run any more."""
        self.failure = error
        self.kill()
        raise error


def _done(calls: list[Any], timeout: float | None, number: int | None = None) -> list[Any]:
    """Those that have ended, or failed, once so many have, or all; waits no longer than `timeout` seconds."""
    return ray.wait(calls, num_returns=number or len(calls), timeout=timeout)[0] if calls else []


def _reason(error: RayError) -> str:
    """What Ray says, without what it supposes; of an error in Python, what it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not DETAIL.match(line)]
    if _of_python(error):
        return lines[-1]
    if len(lines) > 1 and lines[0].startswith("The actor died unexpectedly before"):
        del lines[0]
    return " ".join(lines).partition(" Some common causes")[0]


def _of_python(error: RayError) -> bool:
    """Whether an exception was raised in the actor, rather than its process lost."""
    return isinstance(error, RayTaskError) or (isinstance(error, RayActorError) and error.actor_init_failed)
