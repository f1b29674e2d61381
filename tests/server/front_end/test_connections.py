"""A connection whose transport is closed already when the limits of time are checked."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from engine.core.config import ServerConfig
from engine.server.front_end.connections import Connection, ConnectionOwner
from engine.server.front_end.main import loop_factory
from engine.server.shared.metrics_table import DropReason


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


def connect_and_close(connection: socket.socket) -> None:
    """What a client does that asks for nothing."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.wrap_socket(connection).close()


@pytest.mark.parametrize("make_loop", [None, loop_factory()], ids=["asyncio", "uvloop"])
def test_a_tls_connection_can_be_checked_after_its_transport_has_closed(
    server_context: ssl.SSLContext, make_loop: object
) -> None:
    async def serve() -> None:
        owner = Owner()
        config = uvicorn.Config(no_app, lifespan="off", ws="none", log_config=None)
        config.load()
        connection = CheckedAtItsEnd(uvicorn.Server(config), ServerConfig(), owner)
        connection.ended = asyncio.get_running_loop().create_future()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
        accepted.setblocking(False)
        thread = threading.Thread(target=connect_and_close, args=(client,))
        thread.start()
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: connection, accepted, ssl=server_context)
        closed_socket, has_traffic = await asyncio.wait_for(connection.ended, 30)
        thread.join()
        assert closed_socket is None, "a TLS transport forgets its socket when it closes"
        assert not has_traffic
        assert owner.drops == []

    with asyncio.Runner(loop_factory=make_loop) as runner:  # type: ignore[arg-type]
        runner.run(serve())
