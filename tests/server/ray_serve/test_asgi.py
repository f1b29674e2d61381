from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from engine.server.ray_serve.asgi import AsgiConnection, with_connections


def test_chunks_are_sent_in_order_and_before_later_messages() -> None:
    async def main() -> None:
        sent: list[Message] = []
        open_gate = asyncio.Event()

        async def send(message: Message) -> None:
            await open_gate.wait()
            sent.append(message)

        connection = AsgiConnection(send)
        calls: list[bool] = []
        connection.when_writable(lambda: calls.append(connection.full))
        for chunk in (b"one", b"two"):
            connection.write_chunk(chunk)
        assert connection.full
        last = asyncio.ensure_future(connection.send({"type": "http.response.body", "body": b"last"}))
        await asyncio.sleep(0)
        assert not sent
        open_gate.set()
        await last
        assert [message["body"] for message in sent] == [b"onetwo", b"last"]
        assert calls == [False]

    asyncio.run(main())


def test_a_failure_to_send_a_chunk_reaches_the_response() -> None:
    async def main() -> str:
        async def send(message: Message) -> None:
            raise OSError("the client has left")

        connection = AsgiConnection(send)
        connection.write_chunk(b"one")
        try:
            await connection.send({"type": "http.response.body"})
        except OSError as error:
            return str(error)
        return ""

    assert asyncio.run(main()) == "the client has left"


def test_a_request_finds_its_connection_in_the_state() -> None:
    async def main() -> list[Message]:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope["state"]["connection"].write_chunk(b"chunk")
            await send({"type": "http.response.body", "body": scope["state"]["other"]})

        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError

        await with_connections(app)({"type": "http", "state": {"other": b"kept"}}, receive, send)
        return sent

    assert [message["body"] for message in asyncio.run(main())] == [b"chunk", b"kept"]
