from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.server.front_end.otlp_http import RefusedError, UnavailableError
from engine.server.front_end.request_trace import RequestTrace
from engine.server.front_end.trace_context import TraceContext
from engine.server.front_end.trace_exporter import MAX_BATCH, MAX_QUEUE, TraceExporter


def trace(number: int) -> RequestTrace:
    context = TraceContext(f"{number:032x}", f"{number:016x}", True)
    return RequestTrace(
        context=context, parent=None, method="GET", path="/", scheme="http", http_version="1.1", client="", began=0.0
    )


class Names:
    """Encodes a batch as the numbers of its traces."""

    def encode(self, traces: Iterator[RequestTrace], clock_offset: float) -> tuple[bytes, int]:
        assert clock_offset > 0
        found = [str(int(one.context.trace_id, 16)) for one in traces]
        if "66666" in found:
            raise ValueError("it cannot be encoded")
        return ",".join(found).encode(), len(found)


class Gated:
    """A collector: what each message answers is taken from `answers`; waits for `gate`."""

    url = "http://collector"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.sent: list[str] = []
        self.arrived = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.closed = threading.Event()

    def send(self, data: bytes) -> tuple[int, str]:
        self.arrived.release()
        assert self.gate.wait(30)
        answer = self.answers.pop(0) if self.answers else (0, "")
        if isinstance(answer, Exception):
            raise answer
        self.sent.append(data.decode())
        found: tuple[int, str] = answer
        return found

    def close(self) -> None:
        self.closed.set()


def export(destination: Gated, lost: list[int] | None = None) -> TraceExporter:
    on_drop = lost.append if lost is not None else lambda count: None
    return TraceExporter(Names(), destination, on_drop, interval=0.001, pause=0.001)


def test_traces_are_sent_in_batches_while_requests_go_on() -> None:
    destination = Gated()
    destination.gate.clear()
    exporter = export(destination)
    exporter.put(trace(0))
    assert destination.arrived.acquire(timeout=30)
    for number in range(1, MAX_BATCH + 2):
        exporter.put(trace(number))
    destination.gate.set()
    exporter.close(30)
    numbers = [list(map(int, message.split(","))) for message in destination.sent]
    assert numbers == [[0], list(range(1, MAX_BATCH + 1)), [MAX_BATCH + 1]]
    assert destination.closed.is_set()


def test_a_collector_that_is_slow_costs_traces_and_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    destination, lost = Gated(), list[int]()
    destination.gate.clear()
    exporter = export(destination, lost)
    exporter.put(trace(0))
    assert destination.arrived.acquire(timeout=30)
    with caplog.at_level(logging.WARNING):
        for number in range(1, MAX_QUEUE + 101):
            exporter.put(trace(number))
    assert sum(lost) == 100
    (logged,) = caplog.messages
    assert logged.startswith("lost traces of requests: 1, because http://collector takes spans too slowly")
    destination.gate.set()
    exporter.close(30)
    assert len(",".join(destination.sent).split(",")) == MAX_QUEUE + 1


def test_a_collector_that_is_down_gets_the_same_spans_again(caplog: pytest.LogCaptureFixture) -> None:
    destination = Gated(ConnectionRefusedError("refused"), UnavailableError("it answers 503"), (0, ""))
    exporter = export(destination)
    with caplog.at_level(logging.WARNING):
        exporter.put(trace(1))
        for _ in range(3):
            assert destination.arrived.acquire(timeout=30)
        exporter.close(30)
    assert destination.sent == ["1"]
    assert caplog.messages == [
        "traces of requests cannot be sent to http://collector: refused",
        "traces of requests are sent to http://collector again",
    ]


def test_spans_that_are_refused_or_rejected_are_lost_and_the_next_ones_are_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    destination, lost = Gated(RefusedError("it answers 400"), (2, "too old")), list[int]()
    exporter = export(destination, lost)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            exporter.put(trace(number))
            assert destination.arrived.acquire(timeout=30)
        exporter.put(trace(66666))
        exporter.close(30)
    assert destination.sent == ["2", "3"]
    assert lost == [1, 1]
    assert "does not take them: it answers 400" in caplog.text
    assert "http://collector rejected 2 of 1 spans: too old" in caplog.text
    assert "could not be encoded" in caplog.text


def test_the_end_is_not_delayed_by_a_collector_that_hangs_or_is_down(caplog: pytest.LogCaptureFixture) -> None:
    hanging, lost = Gated(), list[int]()
    hanging.gate.clear()
    exporter = export(hanging, lost)
    exporter.put(trace(0))
    assert hanging.arrived.acquire(timeout=30)
    exporter.put(trace(1))
    exporter.close(0.01)
    assert lost == [1]
    assert "did not take them before the end" in caplog.text
    hanging.gate.set()
    assert hanging.closed.wait(30)

    down, lost = Gated(*[ConnectionRefusedError("refused")] * 9), list[int]()
    down.gate.clear()
    exporter = TraceExporter(Names(), down, lost.append, interval=0.001, pause=1000.0)
    exporter.put(trace(0))
    assert down.arrived.acquire(timeout=30)
    down.gate.set()
    exporter.close(30)
    assert down.closed.is_set()
    assert lost == [1]
