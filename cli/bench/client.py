"""A load process of `engine bench serve`: streams completions over HTTP/1.1 and records the time of each event.

The load generator must not limit the server, so it only counts the events of an answer and reads the number of tokens
from the usage at the end. Protocol: a line with the `Job` as JSON on standard input, "ready" on standard output, a line
with the time.monotonic() of the start on standard input, one line of `Answers` on standard output.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import sys
import time
from collections.abc import Callable

import attrs
from attrs import define, field, frozen

from engine.cli.bench.load import random_tokens
from engine.server.shared.authority import authority

MARK = b"\ndata: "
"""Start of an event. JSON escapes line ends; before the first event comes the line end of a header or chunk size."""
USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
LETTERS = "abcdefghijklmnopqrstuvwxyz"
KEPT = 2048
"""Bytes at the end of an answer that are searched for the usage."""


@frozen(kw_only=True)
class Job:
    """The work of one load process."""

    host: str
    port: int
    model: str
    api_key: str
    input_len: int
    output_len: int
    vocab_size: int
    requests: int
    connections: int
    """Concurrent requests; 0: as many as arrive at `rate`."""
    rate: float
    """Requests per second, at random intervals (Poisson); 0: each connection sends the next after an answer."""
    seed: int
    timeout: float
    """Timeout of the whole job, seconds."""
    text: bool = False
    """Send prompts as texts of random words, of about `input_len` tokens, which the server tokenizes."""


@frozen(kw_only=True)
class Answered:
    """Result of one request. Times are time.monotonic()."""

    sent: float
    events: tuple[float, ...] = ()
    """Arrival times of the events with text."""
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.events[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None without a second token."""
        return (self.events[-1] - self.events[0]) / (self.tokens - 1) if self.tokens > 1 else None


@frozen(kw_only=True)
class Answers:
    """Results of one load process."""

    answers: tuple[Answered, ...]
    cpu: float
    """CPU seconds of the process during the job."""


@define
class Reply:
    """Parser of the HTTP response to a streamed completion."""

    expected: int
    """Requested output tokens."""
    status: int = 0
    times: list[float] = field(factory=list)
    _head: bytes | None = b""
    _left: int | None = None
    """Remaining bytes of the body; None: the body is chunked."""
    _end: bytes = b""

    def feed(self, data: bytes, now: float) -> bool:
        """Parse received bytes; returns whether the response is complete."""
        if self._head is not None:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return False
            self._head, self._end = None, b"\n"
            self._start(head.lower())
        across = self._end[1 - len(MARK) :] + data[: len(MARK) - 1]
        count = data.count(MARK) + across.count(MARK)
        self.times += [now] * count
        self._end = (self._end + data)[-KEPT:]
        if self._left is None:
            return self._end.endswith(b"\r\n0\r\n\r\n")
        self._left -= len(data)
        return self._left <= 0

    def answered(self, sent: float) -> Answered:
        """The result, once complete."""
        if self.status != 200:
            return Answered(sent=sent, error=f"status {self.status}: {self._text()}")
        found = USAGE.findall(self._end)
        if b"data: [DONE]" not in self._end or not found:
            return Answered(sent=sent, error=f"the stream ended early: {self._text()}")
        tokens, events = int(found[-1]), tuple(self.times[:-2])  # usage and [DONE] hold no text
        if tokens != self.expected or not events:
            return Answered(sent=sent, error=f"{tokens} tokens in {len(events)} events, not {self.expected} tokens")
        return Answered(sent=sent, events=events, tokens=tokens)

    def _start(self, head: bytes) -> None:
        self.status = int(head.split(b" ", 2)[1])
        length = re.search(rb"\r\ncontent-length:\s*(\d+)", head)
        self._left = int(length[1]) if length else None

    def _text(self) -> str:
        return " ".join(self._end[-300:].decode(errors="replace").split())


class Connection(asyncio.Protocol):
    """A connection with at most one request in flight."""

    def __init__(self) -> None:
        self.open = False
        self._transport: asyncio.WriteTransport | None = None
        self._reply: Reply | None = None
        self._sent = 0.0
        self._done: asyncio.Future[Answered] | None = None

    def ask(self, payload: bytes, expected: int) -> asyncio.Future[Answered]:
        """Send a request."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._reply = Reply(expected)
        self._sent = time.monotonic()
        self._transport.write(payload)
        return self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if self._reply is not None and self._reply.feed(data, now):
            self._finish(self._reply.answered(self._sent))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._finish(Answered(sent=self._sent, error=f"the connection was lost: {exc or 'closed by the server'}"))

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def _finish(self, answered: Answered) -> None:
        self._reply = None
        if self._done is not None and not self._done.done():
            self._done.set_result(answered)


class Client:
    """Runs a `Job`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        draw = random.Random(job.seed)
        self._gaps = [draw.expovariate(job.rate) if job.rate else 0.0 for _ in range(job.requests)]
        self._payloads = [self._payload(draw) for _ in range(job.requests)]
        self._idle: list[Connection] = []
        self._all: list[Connection] = []
        self._answers: list[Answered] = []
        self._over = False

    async def run(self, begin: float) -> tuple[Answered, ...]:
        """Run all requests from time.monotonic() == begin on; requests still open at the timeout are errors."""
        loop = asyncio.get_running_loop()
        count = 0 if self._job.rate else min(self._job.connections, self._job.requests)
        self._idle = [await self._connect() for _ in range(count)]
        await asyncio.sleep(begin - time.monotonic())
        work = self._arrivals() if self._job.rate else self._closed_loop(count)
        task = loop.create_task(work)
        done, _ = await asyncio.wait({task}, timeout=self._job.timeout)
        self._over = True
        for connection in self._all:
            connection.close()
        if not done:
            await asyncio.wait({task}, timeout=5)  # closing a connection ends its request
            task.cancel()
        missing = self._job.requests - len(self._answers)
        late = Answered(sent=begin, error=f"no answer within {self._job.timeout:g} s")
        if done:
            task.result()
        return (*self._answers, *[late] * missing)

    async def _closed_loop(self, count: int) -> None:
        """Closed loop: each connection sends its next request after an answer."""
        waiting = list(reversed(self._payloads))

        async def one_after_the_other() -> None:
            while waiting and not self._over:
                await self._ask(waiting.pop())

        await asyncio.gather(*(one_after_the_other() for _ in range(count)))

    async def _arrivals(self) -> None:
        """Open loop: send each request at its random arrival time."""
        due, tasks = time.monotonic(), []
        for gap, payload in zip(self._gaps, self._payloads, strict=True):
            due += gap
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            tasks.append(asyncio.ensure_future(self._ask(payload)))
        await asyncio.gather(*tasks)

    async def _ask(self, payload: bytes) -> None:
        asked = time.monotonic()
        try:
            self._idle = [connection for connection in self._idle if connection.open]
            connection = self._idle.pop() if self._idle else await self._connect()
            answered = await connection.ask(payload, self._job.output_len)
        except OSError as error:
            self._answers.append(Answered(sent=asked, error=f"no connection: {error}"))
            return
        self._answers.append(answered)
        if connection.open and not answered.error:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, self._job.host, self._job.port)
        self._all.append(connection)
        return connection

    def _payload(self, draw: random.Random) -> bytes:
        job = self._job
        prompt: str | tuple[int, ...] = random_tokens(draw, job.input_len, job.vocab_size)
        if job.text:
            prompt = " ".join("".join(draw.choices(LETTERS, k=4)) for _ in range(max(1, job.input_len // 3)))
        body = json.dumps(
            {
                "model": job.model,
                "prompt": prompt,
                "max_tokens": job.output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            separators=(",", ":"),
        ).encode()
        key = f"Authorization: Bearer {job.api_key}\r\n" if job.api_key else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {authority(job.host, job.port)}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def main(read: Callable[[], str] = sys.stdin.readline) -> None:
    """Entry point of the load process."""
    client = Client(Job(**json.loads(read())))
    print("ready", flush=True)
    begin = float(read())
    before = _cpu()
    answers = asyncio.run(client.run(begin))
    print(json.dumps(attrs.asdict(Answers(answers=answers, cpu=_cpu() - before))), flush=True)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
