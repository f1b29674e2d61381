"""What traces cost a request in a front end, in microseconds of processor time.

    python benchmarks/trace_cost.py [--requests 20000] [--machine NAME] [--json FILE]

"recorded" is what tracing adds to the event loop's work for a request: the middleware, the generation's trace, and the
queue. "not sampled" is the same for a request that is not recorded, "encoded" what the exporter's thread does for a
recorded one afterwards: its five spans as OTLP. Each is timed alone, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from engine.cli.bench.report import Row, report, write
from engine.core.types import Output, Request, RequestTimes, SamplingParams
from engine.server.front_end.otlp_spans import SpanEncoder
from engine.server.front_end.request_trace import TRACE, GenerationTrace, RequestTrace, Tracer
from engine.server.http.tracing import Tracing

HEADERS = [
    (b"host", b"localhost:8000"),
    (b"user-agent", b"benchmark"),
    (b"content-type", b"application/json"),
    (b"content-length", b"100"),
]
REQUEST = Request(id="chatcmpl-0-0", prompt=tuple(range(100)), params=SamplingParams(max_tokens=100))
NUMBERS = count()
TIMES = RequestTimes(arrival=1.0, scheduled=1.1, first_token=1.2, finished=2.0)
LAST = Output(request=REQUEST.id, tokens=(1,), finish_reason="length", times=TIMES)


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers as the server does, with only the work that tracing adds."""
    trace: RequestTrace | None = scope["state"].get(TRACE)
    if trace is not None:
        trace.preparing = time.monotonic()
        name = f"chatcmpl-{next(NUMBERS)}"
        trace.generation = GenerationTrace.of("chat", "model", name, [REQUEST], 1, True)
        trace.generation.begin_choice(0, TIMES, 0, True)
        trace.generation.end_choice(0, "length", LAST)
        trace.generation.end({0: 100})
    head = [(b"x-request-id", b"%d" % next(NUMBERS))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b""})


async def sent(message: Any) -> None:
    """Takes a message of the application."""


def microseconds(app: Any, requests: int) -> float:
    """Processor time of a request, microseconds."""

    async def answer_all() -> float:
        begin = time.process_time()
        for _ in range(requests):
            scope = {
                "type": "http",
                "method": "POST",
                "path": "/v1/chat/completions",
                "scheme": "http",
                "http_version": "1.1",
                "client": ("127.0.0.1", 1),
                "headers": HEADERS,
                "state": {},
            }
            await app(scope, None, sent)
        return (time.process_time() - begin) / requests * 1e6

    return asyncio.run(answer_all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--machine", default="", help="name of the machine in the result")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    requests: int = arguments.requests

    def traced(sample: float, put: Callable[[RequestTrace], None]) -> float:
        return microseconds(Tracing(application, Tracer(sample, put)), requests)

    traces: list[RequestTrace] = []
    microseconds(application, requests)  # warm up
    without = microseconds(application, requests)
    recorded = traced(1.0, traces.append) - without
    not_sampled = traced(0.0, traces.append) - without
    encoder = SpanEncoder({"service.name": "engine"}, "0")
    begin = time.process_time()
    for start in range(0, len(traces), 64):
        encoder.encode(traces[start : start + 64], 0.0)
    encoded = (time.process_time() - begin) / len(traces) * 1e6
    costs = (("recorded", recorded), ("not sampled", not_sampled), ("encoded", encoded))
    rows = [Row(metric="processor time per request", value=value, unit="us", case=case) for case, value in costs]
    for case, value in costs:
        print(f"{case:12} {value:6.1f} us")
    if arguments.json is not None:
        write(arguments.json, report("trace-cost", arguments.machine, rows, {"requests": requests}))


if __name__ == "__main__":
    main()
