"""Connections by TLS: checked when they are closed already, and closed at the end of the server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from engine.core.config import ServerConfig
from engine.server.front_end.connections import Connection, ConnectionOwner
from engine.server.front_end.main import loop_factory
from engine.server.shared.metrics_table import DropReason

LoopFactory = Callable[[], asyncio.AbstractEventLoop] | None

loops = pytest.mark.parametrize("make_loop", [None, loop_factory()], ids=["asyncio", "uvloop"])


class Owner(ConnectionOwner):
    """Notes why connections are dropped."""

    def __init__(self) -> None:
        self.drops: list[DropReason] = []

    def opened(self, connection: Connection) -> None:
        pass

    def set_idle(self, connection: Connection, idle: bool) -> None:
        pass

    def dropped(self, reason: DropReason) -> None:
        self.drops.append(reason)

    def closed(self, connection: Connection) -> None:
        pass


class CheckedAtItsEnd(Connection):
    """Is checked when it has closed and is about to learn of that, as by a timer that is due in between."""

    ended: asyncio.Future[tuple[object, bool]]

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self.check_time(self.loop.time())
            self.ended.set_result((self.transport.get_extra_info("socket"), self.has_traffic))
        except Exception as error:
            self.ended.set_exception(error)
        super().connection_lost(exc)


async def no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request comes")


@pytest.fixture
def server_context(tmp_path: Path) -> ssl.SSLContext:
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    new = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(["openssl", *new, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def make_server(app: Any) -> uvicorn.Server:
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None)
    config.load()
    return uvicorn.Server(config)


def connected(buffer: int | None = None) -> tuple[socket.socket, socket.socket]:
    """A client's socket and the server's. buffer: size of the client's buffer, bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.socket()
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    return client, accepted


def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def connect_and_close(connection: socket.socket) -> None:
    """What a client does that asks for nothing."""
    client_context().wrap_socket(connection).close()


def read_when(reads: threading.Event, closes: threading.Event, connection: socket.socket) -> bytes:
    """Send a request, but read the response once `reads` is set, up to TLS's end; close once `closes` is set."""
    connection.settimeout(30)
    with client_context().wrap_socket(connection, suppress_ragged_eofs=False) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reads.wait(30)
        received = b"".join(iter(lambda: client.recv(2**16), b""))  # raises if TLS's end does not come
        assert closes.wait(30)
    return received


class LargeResponse:
    """An application that answers any request with a body that no socket's buffer can hold."""

    BODY = bytes(8 * 2**20)

    def __init__(self) -> None:
        self.asked, self.answers, self.sent = asyncio.Event(), asyncio.Event(), asyncio.Event()
        """A request has come; it may be answered; the response is written, and most of it waits for the client."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.set()
        await self.answers.wait()
        headers = [(b"content-length", b"%d" % len(self.BODY))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        response = asyncio.ensure_future(send({"type": "http.response.body", "body": self.BODY}))
        await asyncio.sleep(0)
        self.sent.set()
        await response


class Noted(Connection):
    """Notes that it has ended."""

    def __init__(self, server: uvicorn.Server, limits: ServerConfig, owner: ConnectionOwner) -> None:
        super().__init__(server, limits, owner)
        self.ended = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended.set()


@loops
def test_a_tls_connection_can_be_checked_after_its_transport_has_closed(
    server_context: ssl.SSLContext, make_loop: LoopFactory
) -> None:
    async def serve() -> None:
        owner = Owner()
        connection = CheckedAtItsEnd(make_server(no_app), ServerConfig(), owner)
        connection.ended = asyncio.get_running_loop().create_future()
        client, accepted = connected()
        thread = threading.Thread(target=connect_and_close, args=(client,))
        thread.start()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: connection, accepted, ssl=server_context)
        closed_socket, has_traffic = await asyncio.wait_for(connection.ended, 30)
        thread.join()
        assert closed_socket is None, "a TLS transport forgets its socket when it closes"
        assert not has_traffic
        assert owner.drops == []

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(serve())


@loops
@pytest.mark.parametrize("answered", [True, False])
def test_a_tls_connection_ends_without_the_client_once_it_has_all_data_when_the_server_ends(
    server_context: ssl.SSLContext, make_loop: LoopFactory, answered: bool
) -> None:
    async def serve() -> None:
        app, reads, closes = LargeResponse(), threading.Event(), threading.Event()
        connection = Noted(make_server(app), ServerConfig(), Owner())
        client, accepted = connected(buffer=4096)
        with accepted:
            response = asyncio.ensure_future(asyncio.to_thread(read_when, reads, closes, client))
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection, accepted, ssl=server_context)
            await asyncio.wait_for(app.asked.wait(), 30)
            if not answered:
                connection.shutdown()
            app.answers.set()
            await app.sent.wait()
            if answered:
                connection.shutdown()
            reads.set()
            await asyncio.wait_for(connection.ended.wait(), 20)
            closes.set()
            assert (await response).endswith(b"\r\n\r\n" + app.BODY)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(serve())
