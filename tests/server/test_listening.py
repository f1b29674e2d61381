"""TLS and Unix domain sockets of a real server."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A certificate for localhost, its key, and the key encrypted with the password `opens`."""
    directory = tmp_path_factory.mktemp("tls")
    certificate, key, encrypted = (directory / name for name in ("cert.pem", "key.pem", "encrypted.pem"))
    new = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    for command in (
        [*new, *names, "-keyout", str(key), "-out", str(certificate)],
        ["rsa", "-aes256", "-in", str(key), "-passout", "pass:opens", "-out", str(encrypted)],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return certificate, key, encrypted


@needs_openssl
def test_tls_serves_streams_and_refuses_plain_clients(serve_fake: Serve, certificate: tuple[Path, Path, Path]) -> None:
    public, _, encrypted = certificate
    tls = {"ssl_certfile": str(public), "ssl_keyfile": str(encrypted), "ssl_keyfile_password": "opens"}
    with serve_fake(**tls) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=str(public))) as http:
            for _ in range(2):
                assert http.post("/v1/completions", json=COMPLETION).json()["choices"][0]["text"] == "abcd"
            stream = http.post("/v1/completions", json=COMPLETION | {"stream": True, "max_tokens": 100})
            assert stream.text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.HTTPError):
                httpx.get(server.url.replace("https", "http"), timeout=5)
            with pytest.raises(httpx.ConnectError, match="certificate"):
                httpx.get(server.url, timeout=30)
            assert http.get("/health").status_code == 200
        assert server.stop() == 0


@needs_openssl
def test_a_client_that_leaves_a_tls_server_frees_its_requests(
    serve_fake: Serve, gate: Any, certificate: tuple[Path, Path, Path]
) -> None:
    public, key, _ = certificate
    with serve_fake(ssl_certfile=str(public), ssl_keyfile=str(key)) as server:
        trust = ssl.create_default_context(cafile=str(public))
        with httpx.Client(base_url=server.url, verify=trust) as http:
            with server.asked(COMPLETION | {"prompt": gate.prompt}, trust):
                server.until(lambda: server.metrics(http.get)["engine_num_requests_running"] == 1)
            aborted = 'engine_requests_finished_total{finish_reason="abort"}'
            server.until(lambda: server.metrics(http.get)[aborted] == 1)


@needs_openssl
def test_connections_that_never_begin_tls_make_room(serve_fake: Serve, certificate: tuple[Path, Path, Path]) -> None:
    public, key, _ = certificate
    with serve_fake(ssl_certfile=str(public), ssl_keyfile=str(key), max_connections=3) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with contextlib.ExitStack() as silent:
            for _ in range(3):
                silent.enter_context(socket.create_connection(address))
            with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=str(public))) as http:
                server.until(lambda: http.get("/health").status_code == 200)  # refused before the others are old
                metrics = server.metrics(http.get)
        assert metrics['engine_connections_dropped_total{reason="evicted"}'] == 1
        assert metrics["engine_connections"] == 3
        assert server.stop() == 0
        assert [line for line in server.errors.splitlines() if "refused connections: " not in line] == []


@needs_openssl
@pytest.mark.parametrize("fault", ["missing", "password", "swapped"])
def test_a_certificate_that_cannot_be_used_stops_the_start(
    serve_fake: Serve, certificate: tuple[Path, Path, Path], fault: str
) -> None:
    public, key, encrypted = certificate
    files = {
        "missing": {"ssl_certfile": "/nowhere.pem"},
        "password": {"ssl_certfile": str(public), "ssl_keyfile": str(encrypted), "ssl_keyfile_password": "hush-hush"},
        "swapped": {"ssl_certfile": str(key), "ssl_keyfile": str(public)},
    }
    with serve_fake(**files[fault]) as server:
        assert server.process.returncode == 1
        assert server.errors.startswith("error: TLS cannot use ")
        assert "hush" not in server.errors


def test_a_unix_domain_socket_is_served_and_removed(serve_fake: Serve, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as left:  # by a killed server
        left.bind(str(path))
    with serve_fake(uds=str(path), access_log="line") as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.example") as http:
            assert http.post("/v1/completions", json=COMPLETION).json()["choices"][0]["text"] == "abcd"
            stream = http.post("/v1/completions", json=COMPLETION | {"stream": True})
            assert stream.text.endswith("data: [DONE]\n\n")
        with serve_fake(uds=str(path)) as second:
            assert second.process.returncode == 1
            assert f"cannot listen on the socket {path} (another server uses it)" in second.errors
        assert path.exists()
        assert server.stop() == 0
        assert " access: - " in server.errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("half_closed", [False, True])
def test_a_client_of_a_unix_domain_socket_that_leaves_frees_its_requests(
    serve_fake: Serve, tmp_path: Path, half_closed: bool
) -> None:
    path = tmp_path / "engine.sock"
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 100}'
    with serve_fake(uds=str(path), options={"delay": 0.01}, access_log="line") as server:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(path))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
            client.sendall(head + body)
            if half_closed:
                client.shutdown(socket.SHUT_WR)
                assert b'"finish_reason":"length"' in b"".join(iter(lambda: client.recv(65536), b""))
        server.until(lambda: (" 200 " if half_closed else " 499 ") in server.errors)


def test_a_file_in_the_place_of_the_socket_is_kept(serve_fake: Serve, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with serve_fake(uds=str(path)) as server:
        assert server.process.returncode == 1
    assert path.read_text() == "mine"


@needs_openssl
def test_a_tls_client_is_not_waited_for_when_the_server_ends(
    serve_fake: Serve, certificate: tuple[Path, Path, Path]
) -> None:
    public, key, _ = certificate
    with serve_fake(ssl_certfile=str(public), ssl_keyfile=str(key)) as server:
        trust = ssl.create_default_context(cafile=str(public))
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with (
            socket.create_connection(address, timeout=30) as plain,
            trust.wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False) as client,
        ):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(9) == b"HTTP/1.1 "
            assert server.stop() == 0
            while client.recv(2**16):  # raises if the connection ends without TLS's end
                pass
        assert server.errors == ""  # uvicorn says when connections stay open
