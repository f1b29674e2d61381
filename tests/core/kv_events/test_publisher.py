"""Batches over real sockets: order and numbers, replays, and what is dropped rather than kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.core.config.tree import KVEventsConfig
from engine.core.errors import ConfigError
from engine.core.kv_events.publisher import END_OF_REPLAY, Publisher, endpoint_of
from engine.core.kv_events.recorder import Removed
from engine.core.kv_events.wire import BatchEncoder
from engine.core.types import FULL

from .router import events

TIMEOUT_MS = 30_000


Open = Callable[[int], Any]


@pytest.fixture
def open_socket() -> Iterator[Open]:
    """Makes sockets, which are closed at the end."""
    context, made = zmq.Context(), []

    def open_one(kind: int) -> Any:
        made.append(context.socket(kind))
        made[-1].setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        return made[-1]

    yield open_one
    for socket in made:
        socket.close(linger=0)
    context.term()


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., KVEventsConfig]:
    """Makes a configuration of endpoints in a directory of their own."""

    def make(**settings: Any) -> KVEventsConfig:
        return KVEventsConfig(
            endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", **settings
        )

    return make


@contextmanager
def publishing(config: KVEventsConfig) -> Iterator[Publisher]:
    publisher = Publisher(config, BatchEncoder((FULL,), 2, rank=config.rank, arrays=False))
    try:
        yield publisher
    finally:
        publisher.close()


def subscriber(open_socket: Open, endpoint: str, *, bind: bool = False) -> Any:
    socket = open_socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    (socket.bind if bind else socket.connect)(endpoint)
    return socket


def replay(open_socket: Open, endpoint: str, first: int) -> list[tuple[int, bytes]]:
    """All that is kept from a sequence number on, asked for by a DEALER as AIBrix does."""
    socket = open_socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    found: list[tuple[int, bytes]] = []
    while True:
        delimiter, sequence, batch = socket.recv_multipart()
        assert delimiter == b""
        if sequence == END_OF_REPLAY:
            assert batch == b""
            return found
        found.append((int.from_bytes(sequence, "big"), batch))


def change(number: int) -> list[Any]:
    return [Removed(0, [number.to_bytes(16)])]


def numbers(batch: bytes) -> list[int]:
    return [number for event in events(batch) for number in event["block_hashes"]]


def wait_for_subscription(publisher: Publisher, socket: Any) -> int:
    """Publish until the subscriber receives; the last number it has received of those published."""
    for number in range(1000):
        publisher.publish(change(number))
        if socket.poll(20):
            break
    while True:
        _, sequence, _ = socket.recv_multipart()
        if int.from_bytes(sequence, "big") == number:
            return number


def test_batches_arrive_in_order_with_topic_and_number(open_socket: Open, config: Any) -> None:
    settings = config(topic="kv@pod-{rank}@model")
    with publishing(settings) as publisher:
        socket = subscriber(open_socket, settings.endpoint)
        last = wait_for_subscription(publisher, socket)
        for number in range(last + 1, last + 50):
            publisher.publish(change(number))
        for number in range(last + 1, last + 50):
            topic, sequence, batch = socket.recv_multipart()
            assert (topic, sequence, numbers(batch)) == (b"kv@pod-0@model", number.to_bytes(8, "big"), [number])
    assert publisher.dropped == 0


def test_late_reader_gets_earlier_batches_by_a_replay(open_socket: Open, config: Any) -> None:
    settings = config()
    with publishing(settings) as publisher:
        for number in range(20):
            publisher.publish(change(number))
        while len(replay(open_socket, settings.replay_endpoint, 0)) < 20:
            pass
        found = replay(open_socket, settings.replay_endpoint, 15)
        assert [(number, numbers(batch)) for number, batch in found] == [(number, [number]) for number in range(15, 20)]
        assert replay(open_socket, settings.replay_endpoint, 20) == []


def test_batches_that_come_together_wake_the_thread_once(
    open_socket: Open, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.core.kv_events.publisher.PAUSE", 0.3)
    settings = config()
    with publishing(settings) as publisher:
        wake, woken = publisher._wake, []
        monkeypatch.setattr(publisher, "_wake", lambda message: (woken.append(message), wake(message)))
        for number in range(50):
            publisher.publish(change(number))
        while len(found := replay(open_socket, settings.replay_endpoint, 0)) < 50:
            pass
        assert 1 <= len(woken) <= 5  # more than one if this thread was stopped for longer than the pause
    assert [(number, numbers(batch)) for number, batch in found] == [(number, [number]) for number in range(50)]


def test_replay_answers_a_plain_request_socket(open_socket: Open, config: Any) -> None:
    settings = config()
    with publishing(settings):
        socket = open_socket(zmq.REQ)
        socket.connect(settings.replay_endpoint)
        socket.send((0).to_bytes(8, "big"))
        assert socket.recv_multipart() == [END_OF_REPLAY, b""]


@pytest.mark.parametrize("bound", [{"buffer_steps": 5}, {"buffer_bytes": 300}])
def test_what_is_kept_for_replays_is_bounded(open_socket: Open, config: Any, bound: dict[str, int]) -> None:
    settings = config(**bound)
    with publishing(settings) as publisher:
        for number in range(100):
            publisher.publish(change(number))
        while not (found := replay(open_socket, settings.replay_endpoint, 0)) or found[-1][0] < 99:
            pass
        assert [number for number, _ in found] == list(range(100 - len(found), 100))
        assert len(found) <= bound.get("buffer_steps", 100)
        assert sum(len(batch) for _, batch in found) <= bound.get("buffer_bytes", 10_000)


def test_malformed_request_for_a_replay_is_ignored(
    open_socket: Open, config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config()
    with publishing(settings):
        socket = open_socket(zmq.DEALER)
        socket.connect(settings.replay_endpoint)
        socket.send_multipart((b"", b"all of it, please"))
        socket.send_multipart((b"", (0).to_bytes(8, "big")))
        assert socket.poll(TIMEOUT_MS)
        assert socket.recv_multipart() == [b"", END_OF_REPLAY, b""]
    assert "8 bytes" in caplog.text


def test_batches_are_dropped_and_counted_when_too_many_wait(
    open_socket: Open, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(max_queue=3)
    with publishing(settings) as publisher:
        while replay(open_socket, settings.replay_endpoint, 0):
            pass
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "_wake", lambda message: None)  # the thread sleeps meanwhile
            for number in range(10):
                publisher.publish(change(number))
        assert (publisher.published, publisher.dropped) == (10, 7)
        publisher.publish(change(10))
        publisher._wake(b"")
        while len(found := replay(open_socket, settings.replay_endpoint, 0)) < 3:
            pass
        publisher.publish(change(11))
        while len(found := replay(open_socket, settings.replay_endpoint, 0)) < 4:
            pass
        assert [number for number, _ in found] == [0, 1, 2, 11]  # the gap shows what is lost
    assert publisher.dropped == 8


def test_reader_that_does_not_read_neither_blocks_nor_delays_others(open_socket: Open, config: Any) -> None:
    settings = config(high_water_mark=1, max_queue=100_000)
    with publishing(settings) as publisher:
        stuck = open_socket(zmq.SUB)
        stuck.set_hwm(1)
        stuck.setsockopt(zmq.RCVBUF, 1)
        stuck.setsockopt(zmq.SUBSCRIBE, b"")
        stuck.connect(settings.endpoint)
        assert stuck.poll(0) == 0
        for number in range(5000):
            publisher.publish(change(number))
        while not (found := replay(open_socket, settings.replay_endpoint, 4999)):
            pass
        assert numbers(found[0][1]) == [4999]
        assert publisher.dropped == 0


def test_publisher_connects_to_a_router_that_listens(open_socket: Open, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/router"
    socket = subscriber(open_socket, endpoint, bind=True)
    settings = KVEventsConfig(endpoint=endpoint, connect=True, rank=4)
    with publishing(settings) as publisher:
        wait_for_subscription(publisher, socket)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [("tcp://*:5557", "tcp://*:5559"), ("tcp://[::]:80", "tcp://[::]:82"), ("ipc:///run/x", "ipc:///run/x.2")],
)
def test_endpoint_of_a_further_rank_is_next_to_the_first(endpoint: str, expected: str) -> None:
    assert endpoint_of(endpoint, KVEventsConfig(rank=2)) == expected
    assert endpoint_of(endpoint, KVEventsConfig()) == endpoint
    assert endpoint_of(endpoint, KVEventsConfig(rank=2, connect=True)) == endpoint


def test_endpoint_that_cannot_be_used_is_refused_with_a_sentence(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_events\.endpoint 'ipc://.*' cannot be used: .*; give an address"):
        Publisher(
            KVEventsConfig(endpoint=f"ipc://{tmp_path}/no/such/directory"),
            BatchEncoder((FULL,), 2, rank=0, arrays=False),
        )
