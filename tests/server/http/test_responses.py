"""Streams over a fake connection."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from engine.server.front_end.errors import ApiError
from engine.server.http.responses import CancellableResponse, prepared, stream


class FakeConnection:
    def __init__(self) -> None:
        self.full = False
        self.chunks: list[bytes] = []
        self.writable: Callable[[], None] | None = None

    def write_chunk(self, data: bytes) -> None:
        self.chunks.append(data)

    def when_writable(self, listener: Callable[[], None] | None) -> None:
        self.writable = listener


class FakeGeneration:
    """Replaces Generation and EventStream: returns what the test puts in."""

    def __init__(self) -> None:
        self.generation = self
        self.finished = self.behind = False
        self.open = False
        self._pending: list[bytes | Exception] = []
        self._last = False
        self._wake: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self.open = True

    def __exit__(self, *_: object) -> None:
        self.open = False
        self._wake = lambda: None

    def listen(self, listener: Callable[[], None]) -> None:
        self._wake = listener

    def write_later(self, write: Callable[[bytes], None], data: bytes) -> None:
        asyncio.get_running_loop().call_soon(write, data)

    def take(self) -> bytes:
        pending, self._pending = self._pending, []
        if self._last:
            self.finished = True
        for each in pending:
            if isinstance(each, Exception):
                raise each
        return b"".join(each for each in pending if isinstance(each, bytes))

    def put(self, data: bytes | Exception, *, last: bool = False) -> None:
        self._pending.append(data)
        self._last = last
        self._wake()


class Client:
    """A client that has requested a stream."""

    def __init__(self, interval: float = 0.0) -> None:
        """interval: seconds without an event after which the stream is kept alive; 0: never."""
        self.events = FakeGeneration()
        self.connection = FakeConnection()
        self.sent: list[Any] = []
        self.disconnected = asyncio.Event()
        scope = {"type": "http", "state": {"connection": self.connection}}
        send_events = stream(
            self.events,  # type: ignore[arg-type]
            {"x-request-id": "r"},
            keep_alive=b": alive\n\n",
            keep_alive_interval=interval,
        )
        answer = CancellableResponse(send_events)
        self.task = asyncio.ensure_future(answer(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, str]:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    @property
    def last(self) -> bytes:
        """The body of the message that ends the response."""
        assert not self.sent[-1].get("more_body", False)
        body: bytes = self.sent[-1]["body"]
        return body


class FakeClock(asyncio.SelectorEventLoop):
    """An event loop whose time moves only when a test says so."""

    now = 0.0

    def time(self) -> float:
        return self.now


def run_with_clock(main: Callable[[Callable[[float], Awaitable[None]]], Coroutine[Any, Any, None]]) -> None:
    """Run `main` with a function that lets seconds pass."""

    async def passes(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, FakeClock)
        loop.now += seconds
        for _ in range(10):
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=FakeClock) as runner:
        runner.run(main(passes))


ALIVE = b": alive\n\n"


def test_a_stream_begins_and_is_kept_alive_when_no_event_comes() -> None:
    async def main(passes: Callable[[float], Awaitable[None]]) -> None:
        client = Client(interval=10)
        await passes(0)
        await passes(9)
        assert client.sent == []
        await passes(1)
        assert [message["status"] for message in client.sent] == [200]
        assert client.connection.chunks == [ALIVE]
        await passes(9)
        assert client.connection.chunks == [ALIVE]
        await passes(1)
        assert client.connection.chunks == [ALIVE, ALIVE]
        client.events.put(b"one")
        await passes(1)
        client.events.put(b"two", last=True)
        await client.task
        assert client.connection.chunks == [ALIVE, ALIVE, b"one", b"two"]
        assert client.last == b"data: [DONE]\n\n"
        await passes(100)
        assert len(client.connection.chunks) == 4, "nothing follows the end"

    run_with_clock(main)


def test_a_stream_is_kept_alive_only_while_it_pauses() -> None:
    async def main(passes: Callable[[float], Awaitable[None]]) -> None:
        client = Client(interval=10)
        await passes(0)
        for _ in range(5):
            client.events.put(b"one")
            await passes(6)
        assert client.connection.chunks == [b"one"] * 5
        await passes(20)
        assert client.connection.chunks == [b"one"] * 5 + [ALIVE]
        client.connection.full = True
        await passes(50)
        assert client.connection.chunks == [b"one"] * 5 + [ALIVE], "nothing is written while the client does not read"
        client.connection.full = False
        client.events.put(b"two", last=True)
        await client.task
        assert client.connection.chunks[6:] == [b"two"]

    run_with_clock(main)


def test_an_error_is_the_last_event_when_the_stream_was_kept_alive_before_the_first_one() -> None:
    async def main(passes: Callable[[float], Awaitable[None]]) -> None:
        client = Client(interval=10)
        await passes(0)
        await passes(10)
        client.events.put(ApiError(400, "no"))
        await client.task
        assert [message.get("status") for message in client.sent] == [200, None]
        assert client.last.startswith(b'data: {"error":{"message":"no"')

    run_with_clock(main)


def test_a_client_that_leaves_is_noticed_when_its_stream_is_kept_alive() -> None:
    async def main(passes: Callable[[float], Awaitable[None]]) -> None:
        client = Client(interval=10)
        await passes(0)
        await passes(10)
        client.disconnected.set()
        await client.task
        assert not client.events.open
        await passes(100)
        assert client.connection.chunks == [ALIVE]

    run_with_clock(main)


def test_events_are_written_as_outputs_come() -> None:
    async def main() -> None:
        client = Client()
        await client.settle()
        assert client.events.open
        assert client.sent == []
        client.events.put(b"")  # half a character
        client.events.put(b"one")
        client.events.put(b"two")
        await client.settle()
        assert [message["type"] for message in client.sent] == ["http.response.start"]
        assert dict(client.sent[0]["headers"])[b"x-request-id"] == b"r"
        assert client.connection.chunks == [b"one", b"two"]
        client.events.put(b"three", last=True)
        await client.task
        assert client.connection.chunks == [b"one", b"two", b"three"]
        assert client.last == b"data: [DONE]\n\n"
        assert not client.events.open

    asyncio.run(main())


def test_all_events_are_written_before_the_response_ends() -> None:
    async def main(*events: bytes) -> None:
        client = Client()
        order = client.sent
        client.connection.chunks = order
        await client.settle()
        for event in events:  # all before the task wakes
            client.events.put(event, last=event == events[-1])
        await client.task
        start, *written, end = order
        assert start["type"] == "http.response.start"
        assert b"".join(written) == b"".join(events)
        assert end["body"] == b"data: [DONE]\n\n"

    asyncio.run(main(b"all"))
    asyncio.run(main(b"one", b"two"))
    asyncio.run(main(b"one", b"two", b"three"))


def test_a_stream_without_events_ends_with_its_generation() -> None:
    async def main() -> None:
        client = Client(interval=60)
        await client.settle()
        client.events.put(b"", last=True)
        await asyncio.wait_for(client.task, 10)
        assert client.last == b"data: [DONE]\n\n"

    asyncio.run(main())


def test_all_events_are_written_before_an_error_that_comes_before_the_task_wakes() -> None:
    async def main() -> None:
        client = Client()
        order = client.sent
        client.connection.chunks = order
        await client.settle()
        client.events.put(b"one")
        client.events.put(ApiError(500, "broken"))
        await client.task
        start, written, end = order
        assert (start["type"], written) == ("http.response.start", b"one")
        assert b"broken" in end["body"]

    asyncio.run(main())


def test_building_goes_on_in_later_iterations_while_the_generation_is_behind() -> None:
    async def main() -> None:
        client = Client()
        await client.settle()
        client.events.behind = True
        client.events.put(b"one")
        for data in (b"two", b"three"):
            client.events._pending.append(data)  # no output comes that would wake the stream
            await client.settle()
        assert b"".join(client.connection.chunks) == b"onetwothree"
        client.events.behind = False
        client.events.put(b"", last=True)
        await client.task
        assert client.last == b"data: [DONE]\n\n"

    asyncio.run(main())


def test_no_events_are_built_while_the_client_does_not_read() -> None:
    async def main() -> None:
        client = Client()
        await client.settle()
        client.events.put(b"one")
        await client.settle()
        client.connection.full = True
        client.events.put(b"two")
        client.events.put(b"three", last=True)
        await client.settle()
        assert client.connection.chunks == [b"one"]
        client.connection.full = False
        assert client.connection.writable is not None
        client.connection.writable()
        await client.task
        assert client.connection.chunks == [b"one", b"twothree"]
        assert client.connection.writable is None

    asyncio.run(main())


def test_an_early_error_is_a_response_and_a_late_one_an_event() -> None:
    async def main() -> None:
        early, late, broken = Client(), Client(), Client()
        await early.settle()
        early.events.put(ApiError(400, "no"))
        await early.task
        assert early.sent[0]["status"] == 400
        assert early.connection.chunks == []
        for client, error in ((late, ApiError(503, "enough")), (broken, KeyError("a bug"))):
            client.events.put(b"one")
            await client.settle()
            client.events.put(error)
            await client.task
            assert client.sent[0]["status"] == 200
            assert client.last.startswith(b'data: {"error":{"message":')
        assert b"enough" in late.last
        assert b"see the server's log" in broken.last

    asyncio.run(main())


def test_a_disconnect_ends_the_generation() -> None:
    async def main() -> None:
        for started in (False, True):
            client = Client()
            await client.settle()
            if started:
                client.events.put(b"one")
                await client.settle()
            client.disconnected.set()
            await client.task
            assert not client.events.open
            assert len(client.sent) == started

    asyncio.run(main())


def test_a_disconnect_cancels_the_preparation_of_a_response() -> None:
    async def main() -> None:
        disconnected, ended = asyncio.Event(), list[str]()

        async def prepare() -> Any:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        async def receive() -> dict[str, str]:
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            ended.append(message["type"])

        task = asyncio.ensure_future(prepared(prepare)({"type": "http", "state": {}}, receive, send))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        disconnected.set()
        await task
        assert ended == ["cancelled"]

    asyncio.run(main())


def test_the_last_events_of_a_client_that_has_left_are_dropped() -> None:
    async def main() -> None:
        client = Client()
        delayed: list[Callable[[], None]] = []
        client.events.write_later = lambda write, data: delayed.append(lambda: write(data))  # type: ignore[method-assign]
        await client.settle()
        client.events.put(b"all", last=True)
        await client.settle()
        client.disconnected.set()
        await client.task
        assert len(delayed) == 1
        delayed[0]()

    asyncio.run(main())


def test_a_stream_ends_once_when_it_is_woken_again_before_the_last_write() -> None:
    async def main() -> None:
        client = Client()
        written: list[bytes] = []
        client.events.write_later = lambda write, data: written.append(data)  # type: ignore[method-assign]
        await client.settle()
        client.events.put(b"one")
        await client.settle()
        client.events.put(b"two", last=True)
        client.events.put(b"usage again", last=True)
        assert written == [b"one", b"two"]
        client.disconnected.set()
        await client.task

    asyncio.run(main())


def test_a_stream_is_freed_without_a_collection_when_its_client_leaves_after_an_interval() -> None:
    async def main(passes: Callable[[float], Awaitable[None]]) -> None:
        client = Client(interval=10)
        await client.settle()
        client.events.put(b"a")
        await client.settle()
        await passes(10)
        connection = weakref.ref(client.connection)
        client.disconnected.set()
        await client.task
        del client
        await passes(10)
        assert connection() is None

    collects = gc.isenabled()
    gc.disable()
    try:
        run_with_clock(main)
    finally:
        if collects:
            gc.enable()
