"""Publishes batches of events over ZeroMQ, with sequence numbers, and sends earlier ones again on demand.

    PUB      [topic, sequence number, batch]
    ROUTER   a request [sequence number] is answered by [sequence number, batch] of each batch kept from that number on,
             and then by [-1, nothing]

Sequence numbers are big-endian integers of 8 bytes, and begin at 0.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from engine.core.config.tree import KVEventsConfig
from engine.core.errors import ConfigError
from engine.core.kv_events.recorder import Change
from engine.core.kv_events.wire import BatchEncoder

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_REQUEST_BYTES = 1024
"""A longer request for a replay closes its connection."""
PAUSE = 0.005
"""Seconds between the first batch and its sending, in which further batches gather: waking the thread, and having it
compete with the steps for the interpreter's lock, costs more than sending a batch."""
LINGER_MS = 1000
"""Time that batches have to leave when the publisher is closed, milliseconds."""

log = logging.getLogger(__name__)


class Publisher:
    """Sends batches from a thread of its own, so that the caller never waits.

    Memory is bounded: `max_queue` batches for the thread, beyond which batches are dropped and counted;
    `high_water_mark` batches per reader, beyond which ZeroMQ drops batches for this reader; `buffer_steps` batches of
    `buffer_bytes` in all for replays. The gap in the sequence numbers shows a reader what it has missed.
    """

    def __init__(self, config: KVEventsConfig, encoder: BatchEncoder) -> None:
        """Raises ConfigError when an endpoint cannot be used."""
        self.dropped = 0
        """Batches dropped because the thread was too far behind."""
        self.published = 0
        """Batches numbered so far, those dropped included."""
        self._config = config
        self._encoder = encoder
        self._topic = config.topic.replace("{rank}", str(config.rank)).encode()
        self._queue: deque[tuple[int, float, list[Change]]] = deque()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._context = zmq.Context()
        try:
            self._sockets()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._awake = False
        """Whether the thread will look into the queue without being woken."""
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, changes: list[Change]) -> None:
        """Queue the changes as one batch; never blocks."""
        number = self.published
        self.published += 1
        if len(self._queue) >= self._config.max_queue:
            self.dropped += 1
            return
        self._queue.append((number, time.time(), changes))
        if not self._awake:
            self._awake = True
            self._wake(b"")

    def close(self) -> None:
        """Send what is queued, as far as readers take it within a second, and close the sockets."""
        self._wake(b"stop")
        self._thread.join()
        self._sender.close(linger=0)
        self._context.term()

    def _sockets(self) -> None:
        config, context = self._config, self._context
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.high_water_mark)
        _open(self._pub, "endpoint", config.endpoint, config)
        self._router: zmq.Socket[bytes] | None = None
        if config.replay_endpoint:
            self._router = context.socket(zmq.ROUTER)
            self._router.set_hwm(config.buffer_steps + 1)  # a whole replay fits
            self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
            _open(self._router, "replay_endpoint", config.replay_endpoint, config)
        # A ZeroMQ socket belongs to one thread; this pair wakes the thread that has the others.
        self._sender, self._receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._receiver.bind("inproc://kv-events")
        self._sender.connect("inproc://kv-events")
        self._sender.setsockopt(zmq.SNDTIMEO, LINGER_MS)  # the thread may have failed

    def _wake(self, message: bytes) -> None:
        """Wake the thread. An empty message never blocks: a thread with many of them needs no more."""
        with contextlib.suppress(zmq.Again):
            self._sender.send(message, 0 if message else zmq.DONTWAIT)

    def _run(self) -> None:
        sockets = [socket for socket in (self._pub, self._router, self._receiver) if socket is not None]
        poller = zmq.Poller()
        for socket in sockets[1:]:
            poller.register(socket, zmq.POLLIN)
        stopping = False
        try:
            while not stopping:
                ready = dict(poller.poll())
                if self._receiver in ready:
                    stopping = self._receiver.recv() == b"stop"
                    if not stopping:
                        time.sleep(PAUSE)
                    self._awake = False  # before the queue is looked into, so that no later batch is left there
                while self._queue:
                    self._send(*self._queue.popleft())
                if self._router is not None and self._router in ready:
                    self._replay(self._router)
        except Exception:
            log.exception("events of the KV cache are no longer published")
        finally:
            for socket in sockets:
                socket.close(linger=LINGER_MS)

    def _send(self, number: int, seconds: float, changes: Sequence[Change]) -> None:
        """Publish a batch and keep it for replays."""
        sequence, batch = number.to_bytes(8, "big"), self._encoder.encode(seconds, changes)
        self._pub.send_multipart((self._topic, sequence, batch))
        if self._router is None:
            return
        self._kept.append((sequence, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > self._config.buffer_steps or self._kept_bytes > self._config.buffer_bytes:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answer one request: all batches kept from its sequence number on."""
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("a request for events of the KV cache is not one sequence number of 8 bytes; it is ignored")
            return
        client, delimiter, first = frames
        for sequence, batch in self._kept:
            if sequence >= first:
                router.send_multipart((client, delimiter, sequence, batch))
        router.send_multipart((client, delimiter, END_OF_REPLAY, b""))


def endpoint_of(endpoint: str, config: KVEventsConfig) -> str:
    """The endpoint of this rank: the port plus the rank, or the path followed by the rank; to connect to, as given."""
    if not config.rank or config.connect:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{config.rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + config.rank}"


def _open(socket: zmq.Socket[bytes], name: str, endpoint: str, config: KVEventsConfig) -> None:
    address = endpoint_of(endpoint, config)
    try:
        if config.connect and name == "endpoint":
            socket.connect(address)
        else:
            socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv_events.{name} {address!r} cannot be used: {error.strerror}; give an address of this machine and a free"
            " port, as tcp://127.0.0.1:5557"
        ) from error
