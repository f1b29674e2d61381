"""Sends the traces of ended requests to a collector, in a thread, so that requests never wait for the collector."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from engine.server.front_end.request_trace import RequestTrace
from engine.server.shared.throttled_log import ThrottledWarning

if TYPE_CHECKING:
    from engine.core.config import ServerConfig

MAX_QUEUE = 2048
"""Ended requests that wait to be sent; the trace of a further one is dropped."""
MAX_BATCH = 64
"""Requests that are sent together."""
INTERVAL = 1.0
"""Seconds between two looks for ended requests."""
MIN_PAUSE, MAX_PAUSE = 1.0, 30.0
"""Seconds between two attempts to reach the collector; doubled each time."""

log = logging.getLogger(__name__)


class Encoder(Protocol):
    """Makes the message with the spans of a batch; otlp_spans.SpanEncoder."""

    def encode(self, traces: Iterator[RequestTrace], clock_offset: float) -> tuple[bytes, int]:
        """The message and the number of its spans."""


class Destination(Protocol):
    """Takes messages; otlp_http.Collector."""

    url: str

    def send(self, data: bytes) -> tuple[int, str]:
        """Send a message; (number of rejected spans, reason)."""

    def close(self) -> None:
        """Close the connection."""


class TraceExporter:
    """A bounded queue of ended requests, and the thread that empties it. `put` is called from the event loop."""

    def __init__(
        self,
        encoder: Encoder,
        destination: Destination,
        on_drop: Callable[[int], None] = lambda count: None,
        *,
        interval: float = INTERVAL,
        pause: float = MIN_PAUSE,
    ) -> None:
        """on_drop: called with the number of requests whose traces are lost, from either thread."""
        self._encoder = encoder
        self._destination = destination
        self._on_drop = on_drop
        self._interval = interval
        self._min_pause = pause
        self._queue: deque[RequestTrace] = deque()
        self._stopping = threading.Event()
        url = destination.url.replace("%", "%%")
        self._lost = ThrottledWarning(log, f"lost traces of requests: %d, because {url} %s; requests are not affected")
        self._failing = False
        self._lock = threading.Lock()
        """Guards the count of lost traces."""
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, trace: RequestTrace) -> None:
        """Queue a trace; it is dropped while the queue is full. Never waits."""
        if len(self._queue) >= MAX_QUEUE:
            self._drop(1, "takes spans too slowly")
        else:
            self._queue.append(trace)

    def close(self, seconds: float) -> None:
        """Send what is queued, for at most `seconds`."""
        self._stopping.set()
        self._thread.join(seconds)
        if left := len(self._queue):
            self._drop(left, "did not take them before the end")

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            while self._queue and not self._stopping.is_set():
                self._send(self._take())
        while self._queue and self._send(self._take()):
            pass
        self._destination.close()

    def _take(self) -> list[RequestTrace]:
        return [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]

    def _send(self, traces: Sequence[RequestTrace]) -> bool:
        """Send a batch, again while the collector cannot be reached and the server runs; whether it was sent."""
        from engine.server.front_end.otlp_http import RefusedError, UnavailableError

        try:
            data, num_spans = self._encoder.encode(_unhurried(traces), time.time() - time.monotonic())
        except Exception:
            log.exception("traces of requests could not be encoded")
            self._drop(len(traces), "gets no spans that could not be encoded")
            return True
        pause = self._min_pause
        while True:
            try:
                rejected, reason = self._destination.send(data)
            except RefusedError as error:
                self._drop(len(traces), f"does not take them: {error}")
                return True
            except Exception as error:
                if not self._failing:
                    self._failing = True
                    log.warning("traces of requests cannot be sent to %s: %s", self._destination.url, _reason(error))
                asked = error.pause if isinstance(error, UnavailableError) else 0.0
                if self._stopping.wait(min(max(pause, asked), MAX_PAUSE)):
                    self._drop(len(traces), "could not be reached before the end")
                    return False
                pause *= 2
            else:
                if self._failing:
                    self._failing = False
                    log.warning("traces of requests are sent to %s again", self._destination.url)
                if rejected:
                    log.warning("%s rejected %d of %d spans: %s", self._destination.url, rejected, num_spans, reason)
                return True

    def _drop(self, count: int, why: str) -> None:
        with self._lock:
            self._on_drop(count)
            self._lost.count(count, why)


def open_exporter(config: ServerConfig, instance: str, on_drop: Callable[[int], None]) -> TraceExporter:
    """The exporter to server.otlp_endpoint. instance: name of this process. Raises ConfigError."""
    import engine
    from engine.server.front_end.otlp_http import Collector, resource
    from engine.server.front_end.otlp_spans import SpanEncoder

    encoder = SpanEncoder(resource(config.otlp_resource, instance), engine.__version__)
    return TraceExporter(encoder, Collector(config), on_drop)


def _unhurried(traces: Sequence[RequestTrace]) -> Iterator[RequestTrace]:
    """The traces, with turns for the event loop's thread, which would otherwise wait for the interpreter's lock."""
    for trace in traces:
        time.sleep(0)
        yield trace


def _reason(error: Exception) -> str:
    return f"{error}" or type(error).__name__
