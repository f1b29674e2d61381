"""A front end's side of the engine process: sends requests, hands out outputs, ends all when the engine is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

import zmq
from attrs import define

from engine.core.config import ServerConfig
from engine.core.types import EngineStats, Output, Request
from engine.core.wire import Decoder, encode
from engine.server.errors import ApiError
from engine.server.messages import SOCKET, Abort, Add, EngineGone, FromClient, Hello, Outputs, Probe
from engine.server.metrics import Board

RECONNECT_MS = 20
"""How often to look for the engine's socket while the engine starts."""

log = logging.getLogger(__name__)

News = tuple[int, Sequence[int], Output | None]
"""(index of the request in its group, its new tokens, the whole output where it holds more than tokens)."""


class Group:
    """Requests that were submitted together. Leaving its `with` block aborts those that have not finished."""

    def __init__(self, client: EngineClient, numbers: Iterable[int]) -> None:
        self._client = client
        self._open = dict(enumerate(numbers))
        self._news: list[News] = []
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._listener = None
        for index in list(self._open):
            self.abort(index)

    async def next(self) -> list[News]:
        """All that came since the last call, oldest first; waits for something. For one caller at a time.

        Raises ApiError when the engine died or the server gave up waiting for it.
        """
        if not self._news and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, which must not raise, whenever there is something to take; cheaper than a waiting task."""
        self._listener = listener

    def take(self) -> list[News]:
        """As `next`, without waiting."""
        if not self._news and self._error is not None:
            raise self._error
        news, self._news = self._news, []
        return news

    def abort(self, index: int, reason: str = "abort") -> None:
        """Stop a request; its finish is counted under `reason`. No more comes of it."""
        number = self._open.pop(index, None)
        if number is not None:
            self._news = [piece for piece in self._news if piece[0] != index]
            self._client.abort(number, reason)

    def put(self, index: int, tokens: Sequence[int], output: Output | None) -> bool:
        """Called by the client: something has come. Whether it is the first thing since the last `take`."""
        first = not self._news
        self._news.append((index, tokens, output))
        if output is not None and output.finish_reason is not None:
            self._open.pop(index, None)
        return first

    def wake(self) -> None:
        """Called by the client when all is put that has come by now."""
        if self._listener is not None:
            self._listener()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: ApiError) -> None:
        """Called by the client: no more will come."""
        self._open.clear()
        self._error = error
        self.wake()


@define(eq=False)
class _Open:
    """A request that the engine works on."""

    group: Group
    index: int
    """In the group."""
    arrival: float
    latest: float = 0.0
    """When its latest tokens came."""
    begun: bool = False


class EngineClient:
    """The connection of one front end to the engine process. Use from the event loop's thread only."""

    def __init__(self, limits: ServerConfig, board: Board, row: int) -> None:
        """row: where on the board this front end counts."""
        self.board = board
        self.metrics = board.fronts[row]
        self.stats = EngineStats()
        self.failure: EngineGone | None = None
        self._limits = limits
        self._open: dict[int, _Open] = {}
        self._numbered = 0
        self._touched: list[Group] = []
        """Groups with news that have not been woken."""
        self._writes: list[tuple[Callable[[bytes], None], bytes]] = []
        self._decoder: Decoder[Outputs] = Decoder(Outputs)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)

    def connect(self, directory: str, name: str) -> None:
        """Begin to talk, as `name`, to the engine process of the server that has this directory."""
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(f"ipc://{Path(directory) / SOCKET}")
        asyncio.get_running_loop().add_reader(self._socket.FD, self._receive)
        self._send(Hello())

    def submit(self, requests: Sequence[Request]) -> Group:
        """Send requests to the engine. Raises ApiError when it is gone, or has no room for them."""
        if self.failure is not None:
            raise _engine_failed(self.failure)
        most, under_way = self._limits.max_waiting, self.board.under_way
        if under_way + len(requests) > most:
            raise ApiError(
                503,
                f"the server has {under_way} requests under way and takes at most {most} "
                "(server.max_waiting); try again later",
                code="overloaded",
                headers={"retry-after": "1"},
            )
        first = self._numbered
        self._numbered += len(requests)
        group = Group(self, range(first, self._numbered))
        for index, request in enumerate(requests):
            self._open[first + index] = _Open(group, index, request.arrival)
        self.metrics.under_way = len(self._open)
        self._send(Add(first, tuple(requests)))
        return group

    def abort(self, number: int, reason: str) -> None:
        """Stop a request; use Group.abort."""
        if self._open.pop(number, None) is not None:
            self.metrics.under_way = len(self._open)
            self.metrics.ended(reason)
            self._send(Abort((number,)))

    def fail(self, error: ApiError) -> None:
        """End all open requests with this error and abort them in the engine."""
        groups = {entry.group for entry in self._open.values()}
        self.metrics.ended("error", len(self._open))
        if self.failure is None and self._open:
            self._send(Abort(tuple(self._open)))
        self._open.clear()
        self.metrics.under_way = 0
        for group in groups:
            group.fail(error)

    def bury(self, failure: EngineGone) -> None:
        """The engine process is dead: tell everyone who waits for it."""
        self.failure = failure
        self.stats = EngineStats()
        self.fail(_engine_failed(failure))

    def probe(self) -> None:
        """Ask the engine for proof that it computes; it comes in the pulse."""
        self._send(Probe())

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
        asyncio.get_running_loop().remove_reader(self._socket.FD)
        self._context.destroy(linger=0)

    def _write(self) -> None:
        writes, self._writes = self._writes, []
        for write, data in writes:
            try:
                write(data)
            except Exception:  # the others must not suffer
                log.exception("a connection failed")

    def _send(self, message: FromClient) -> None:
        # A socket without high-water mark takes the message at once, also while the engine process is not there yet.
        self._socket.send(encode(message), zmq.DONTWAIT)
        self._look_again()

    def _look_again(self) -> None:
        """ZeroMQ's descriptor becomes readable once for all that has come, and any call may take that sign away."""
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        if events & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            self._hand_out(self._decoder.decode(data))
        # Only now: what came in several messages because this process was late leaves in one write a stream.
        groups, self._touched = self._touched, []
        for group in groups:
            group.wake()
        self._write()

    def _hand_out(self, message: Outputs) -> None:
        """Give each group its news, and keep the books."""
        if message.stats is not None and self.failure is None:
            self.stats = message.stats
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
        if output.finish_reason is not None:
            del self._open[number]
            self.metrics.under_way = len(self._open)
            self.metrics.finish(output.finish_reason, output.times, now - entry.arrival)
        if entry.group.put(entry.index, output.tokens, output):
            self._touched.append(entry.group)


def _engine_failed(failure: EngineGone) -> ApiError:
    return ApiError(503, f"the engine is gone: {failure.reason}; the server needs a restart", code="engine_failed")
