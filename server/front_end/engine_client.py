"""A front end's side of the engine: sends requests to its replicas, hands out outputs, ends what a dead one leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby

import zmq
from attrs import define

from engine.core.config import EngineConfig
from engine.core.types import FINISH_STOP, Output, Request
from engine.server.front_end.engine_link import Link
from engine.server.front_end.errors import ApiError
from engine.server.front_end.request_group import Group
from engine.server.front_end.routing import Router
from engine.server.shared.messages import Abort, Add, EngineGone, Outputs, Started
from engine.server.shared.metrics_table import Board

log = logging.getLogger(__name__)


@define(eq=False)
class _Open:
    """A request that the engine works on."""

    group: Group
    index: int
    """In the group."""
    replica: int
    """That works on it."""
    answer: int
    load: int
    """What it adds to the replica's load when its first token has come, and what it adds now; see routing.Place."""
    arrival: float
    latest: float = 0.0
    """When its latest tokens came."""
    begun: bool = False


class EngineClient:
    """The connections of one front end to the replicas of the engine. Use from the event loop's thread only."""

    def __init__(self, config: EngineConfig, board: Board, row: int) -> None:
        """row: where on the board this front end counts."""
        self.board = board
        self.metrics = board.fronts[row]
        self._limits = limits = config.server
        self._cache = config.cache
        self._open: dict[int, _Open] = {}
        self._numbered = 0
        self._touched: list[Group] = []
        """Groups with news that have not been woken."""
        self._writes: list[tuple[Callable[[bytes], None], bytes]] = []
        self._context = zmq.Context()
        self.links = [
            Link(self._context, replica, self._hand_out, self._wake_all) for replica in range(limits.replicas)
        ]
        self.router = Router([0] * limits.replicas, config.cache.block_size)

    def open(self, directory: str, name: str, started: Started) -> None:
        """Begin to talk, as `name`, to an engine process that has started, of the server that has this directory.

        Where a dead one was there before, its prefix cache is forgotten.
        """
        self.links[started.replica].open(directory, name, started)
        self.router.renew(started.replica, started.cache.num_blocks if self._cache.prefix_caching else 0)

    def submit(self, requests: Sequence[Request]) -> Group:
        """Send requests to the engine. Raises ApiError when it is gone, or has no room for them."""
        loads = self._loads()
        most, under_way = self._limits.max_waiting, self.board.under_way
        if under_way + len(requests) > most:
            raise ApiError(
                503,
                f"the server has {under_way} requests under way and takes at most {most} "
                "(server.max_waiting); try again later",
                code="overloaded",
                headers={"retry-after": "1"},
            )
        places = self.router.place(requests, loads)
        # Each replica's share has numbers in a row.
        order = sorted(range(len(requests)), key=lambda index: places[index].replica)
        numbers = [0] * len(requests)
        for number, index in enumerate(order, self._numbered):
            numbers[index] = number
        self._numbered += len(requests)
        group = Group(self.abort, numbers)
        for index, (number, request, place) in enumerate(zip(numbers, requests, places, strict=True)):
            entry = _Open(group, index, place.replica, place.answer, 0, request.arrival)
            self._weigh(entry, place.prompt + place.answer)
            self._open[number] = entry
        self.metrics.under_way = len(self._open)
        for replica, share in groupby(order, key=lambda index: places[index].replica):
            indices = list(share)
            self.links[replica].send(Add(numbers[indices[0]], tuple(requests[index] for index in indices)))
        return group

    def abort(self, number: int, reason: str) -> None:
        """Stop a request; use Group.abort. One that a stop string has ended is finished, and its duration counts."""
        entry = self._open.get(number)
        if entry is not None:
            self._forget(number, entry)
            if reason == FINISH_STOP:
                self.metrics.finish(reason, None, time.monotonic() - entry.arrival)
            else:
                self.metrics.ended(reason)
            self.links[entry.replica].send(Abort((number,)))

    def fail(self, error: ApiError) -> None:
        """End all open requests with this error and abort them in the engine."""
        self._fail({entry.group for entry in self._open.values()}, error)

    def bury(self, failure: EngineGone) -> None:
        """An engine process is dead: tell everyone who waits for it, for all choices and prompts asked for together."""
        self.links[failure.replica].bury(failure)
        groups = {entry.group for entry in self._open.values() if entry.replica == failure.replica}
        self._fail(groups, self._engine_failed(failure))

    def write_later(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Call `write(data)` soon, in this order: when all groups have been woken that have news.

        A system call between two streams costs more than itself: it leaves the processor's caches and branch predictors
        cold for the Python code after it. So first all events are made, then all are written.
        """
        if not self._writes:
            asyncio.get_running_loop().call_soon(self._write)
        self._writes.append((write, data))

    def close(self) -> None:
        """End the connection."""
        for link in self.links:
            link.close()
        self._context.destroy(linger=0)

    def _write(self) -> None:
        writes, self._writes = self._writes, []
        for write, data in writes:
            try:
                write(data)
            except Exception:  # the others must not suffer
                log.exception("a connection failed")

    def _loads(self) -> list[float | None]:
        """What each replica has to do, tokens; None: it is to take no more. Raises ApiError when all are gone."""
        alive = [link.failure is None for link in self.links]
        if not any(alive):
            last = max((link.failure for link in self.links if link.failure), key=lambda failure: failure.since)
            raise self._engine_failed(last)
        # One that does not go round may come back: it is better than none.
        limit = self._limits.health_timeout
        well = [link.fault(limit) is None for link in self.links] if len(self.links) > 1 else alive
        taking = well if any(well) else alive
        return [load if takes else None for load, takes in zip(self.board.loads, taking, strict=True)]

    def _engine_failed(self, failure: EngineGone) -> ApiError:
        """What those are told who wait for a dead engine."""
        if all(link.failure is not None for link in self.links):
            coming = any(link.failure.coming for link in self.links if link.failure is not None)
            then = "it is started anew, so try again later" if coming else "the server needs a restart"
            what = f"the engine is gone: {failure.reason}; {then}"
        else:
            what = f"replica {failure.replica} of the engine is gone: {failure.reason}; the others go on, so try again"
        return ApiError(503, what, code="engine_failed")

    def _fail(self, groups: set[Group], error: ApiError) -> None:
        """End these groups with this error and abort them in the engine."""
        doomed: dict[int, list[int]] = {}
        for number, entry in list(self._open.items()):
            if entry.group in groups:
                doomed.setdefault(entry.replica, []).append(number)
                self._forget(number, entry)
        for replica, numbers in doomed.items():
            self.metrics.ended("error", len(numbers))
            if self.links[replica].failure is None:
                self.links[replica].send(Abort(tuple(numbers)))
        for group in groups:
            group.fail(error)

    def _forget(self, number: int, entry: _Open) -> None:
        """A request is no longer under way."""
        del self._open[number]
        self.metrics.under_way = len(self._open)
        self._weigh(entry, 0)

    def _weigh(self, entry: _Open, load: int) -> None:
        """From now on a request adds so much to the load of its replica."""
        self.metrics.loads[entry.replica] += load - entry.load
        entry.load = load

    def _wake_all(self) -> None:
        """All is handed out that has come by now."""
        groups, self._touched = self._touched, []
        for group in groups:
            group.wake()
        self._write()

    def _hand_out(self, message: Outputs) -> None:
        """Give each group its news, and keep the books."""
        now = time.monotonic()
        requests, tokens, at = self._open, message.tokens, 0
        touched = self._touched.append
        # Most requests have had a token in each of the last steps: count them together.
        same, like = 0, (now, 1)
        for number, count in zip(message.numbers, message.counts, strict=True):
            entry = requests.get(number)
            if entry is not None:  # else it was aborted meanwhile
                if (entry.latest, count) != like:
                    self._count(now, *like, same)
                    same, like = 0, (entry.latest, count)
                same += 1
                entry.latest = now
                if entry.group.put(entry.index, tokens[at : at + count], None):
                    touched(entry.group)
            at += count
        self._count(now, *like, same)
        for number, output in message.full:
            self._hand_out_whole(number, output, now)

    def _count(self, now: float, latest: float, count: int, requests: int) -> None:
        """So many requests got `count` tokens each, `now` after the ones at `latest`."""
        if requests:
            self.metrics.inter_token.observe((now - latest) / count, count * requests)

    def _hand_out_whole(self, number: int, output: Output, now: float) -> None:
        entry = self._open.get(number)
        if entry is None:
            return
        if output.tokens:
            since = entry.latest if entry.begun else entry.arrival
            self.metrics.tokens(now - since, len(output.tokens), not entry.begun)
            entry.latest, entry.begun = now, True
            self._weigh(entry, entry.answer)
        if output.finish_reason is not None:
            self._forget(number, entry)
            self.metrics.finish(output.finish_reason, output.times, now - entry.arrival)
        if entry.group.put(entry.index, output.tokens, output):
            self._touched.append(entry.group)
