"""The load process: what it makes of a server's bytes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest

from engine.cli.bench.client import Answered, Client, Job, Reply

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices":[{"text":"a\\n\\ndata: b"}]}\n\n',
    b'data: {"choices":[{"text":"c"}]}\n\ndata: {"choices":[{"text":"d"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}\n\n',
    b"data: [DONE]\n\n",
]


def chunked(events: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"


WHOLE = HEAD + chunked(EVENTS)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 11, 64, len(WHOLE)])
def test_events_are_counted_however_the_bytes_are_cut(size: int) -> None:
    reply = Reply(4)
    pieces = [WHOLE[start : start + size] for start in range(0, len(WHOLE), size)]
    assert [reply.feed(piece, float(number)) for number, piece in enumerate(pieces)] == [False] * (len(pieces) - 1) + [
        True
    ]
    answered = reply.answered(-1.0)
    assert answered.error == ""
    assert answered.tokens == 4
    assert len(answered.events) == 3
    assert answered.events == tuple(sorted(answered.events))
    starts = [WHOLE.index(text) for text in (b'data: {"choices":[{"text":"a', b'{"text":"c', b'{"text":"d')]
    assert all(abs(when - start / size) <= 1 + 30 / size for when, start in zip(answered.events, starts, strict=True))


def test_a_reply_ends_with_its_content_length() -> None:
    body = b"".join(EVENTS)
    reply = Reply(4)
    assert not reply.feed(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), 0.0)
    assert not reply.feed(body[:-1], 1.0)
    assert reply.feed(body[-1:], 2.0)
    assert reply.answered(0.0).events == (1.0, 1.0, 1.0)


def test_ttft_and_tpot_follow_from_the_events() -> None:
    answered = Answered(sent=1.0, events=(1.5, 2.0, 3.5), tokens=5)
    assert answered.ttft == 0.5
    assert answered.tpot == 2.0 / 4
    assert Answered(sent=1.0, events=(1.5,), tokens=1).tpot is None


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull", "status 503: full"),
        (HEAD + chunked(EVENTS[:-1]), "the stream ended early"),
        (HEAD + chunked([EVENTS[0], EVENTS[3]]), "the stream ended early"),
        (HEAD + chunked([EVENTS[0], b'data: {"error":{"message":"broke"}}\n\n']), "broke"),
        (HEAD + chunked([EVENTS[0], EVENTS[2].replace(b":4", b":3"), EVENTS[3]]), "3 tokens in 1 events, not 4"),
    ],
    ids=["status", "no end", "no usage", "error event", "too few tokens"],
)
def test_what_is_no_whole_answer_is_an_error(response: bytes, error: str) -> None:
    reply = Reply(4)
    assert reply.feed(response, 0.0)
    assert error in reply.answered(0.0).error


Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
JOB = Job(
    host="127.0.0.1",
    port=0,
    model="tiny",
    api_key="secret",
    input_len=5,
    output_len=4,
    vocab_size=100,
    requests=6,
    connections=2,
    rate=0.0,
    seed=1,
    timeout=10.0,
)


async def read_body(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return head, json.loads(await reader.readexactly(length))


def load(handle: Handle, job: Job) -> tuple[Answered, ...]:
    """Run a job against a server of this process."""

    handlers = []

    async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        await handle(reader, writer)
        writer.close()
        await writer.wait_closed()

    async def both() -> tuple[Answered, ...]:
        server = await asyncio.start_server(noted, job.host, 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            answers = await Client(attrs.evolve(job, port=port)).run(time.monotonic() + 0.01)
            await asyncio.gather(*filter(None, handlers))
            return answers

    return asyncio.run(both())


class Scripted:
    """Answers every request, and remembers them."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.heads: list[bytes] = []
        self.open = self.most = self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head, body = await read_body(reader)
                self.heads.append(head)
                self.bodies.append(body)
                self.open += 1
                self.most = max(self.most, self.open)
                await asyncio.sleep(0.01)
                writer.write(WHOLE)
                self.open -= 1
        except asyncio.IncompleteReadError:
            pass  # the client has hung up


def test_connections_carry_one_request_after_the_other() -> None:
    server = Scripted()
    answers = load(server, JOB)
    assert [one.error for one in answers] == [""] * 6
    assert all(one.ttft >= 0.01 for one in answers)
    assert (server.connections, server.most) == (2, 2)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 6
    assert all(len(prompt) == 5 for prompt in prompts)
    [shape] = {(body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) for body in server.bodies}
    assert shape == ("tiny", 4, True, True)
    assert all(b"authorization: bearer secret\r\n" in head.lower() for head in server.heads)


def has_ipv6() -> bool:
    """Whether this machine has the address ::1."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1", rb"127\.0\.0\.1"),
        pytest.param("::1", rb"\[::1\]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6")),
    ],
)
def test_requests_name_the_host_as_http_writes_it(host: str, name: bytes) -> None:
    server = Scripted()
    answers = load(server, attrs.evolve(JOB, host=host, requests=1))
    assert [one.error for one in answers] == [""]
    assert re.search(rb"\r\nHost: %b:\d+\r\n" % name, server.heads[0])


def test_requests_that_come_at_a_rate_do_not_wait_for_each_other() -> None:
    server = Scripted()
    answers = load(server, attrs.evolve(JOB, connections=0, rate=2000.0))
    assert [one.error for one in answers] == [""] * 6
    assert server.most > 2


def test_a_lost_connection_is_one_error_and_the_rest_goes_on() -> None:
    server = Scripted()
    broken = iter([True])

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if next(broken, False):
            await read_body(reader)
            writer.write(HEAD + b"5\r\n")
        else:
            await server(reader, writer)

    answers = load(handle, attrs.evolve(JOB, connections=1))
    assert sorted(one.error for one in answers) == [""] * 5 + ["the connection was lost: closed by the server"]


def test_what_has_no_answer_in_time_is_an_error() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    answers = load(handle, attrs.evolve(JOB, timeout=0.2))
    assert len(answers) == 6
    assert all(one.error for one in answers)
    assert "no answer within 0.2 s" in {one.error for one in answers}
