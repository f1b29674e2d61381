"""The socket on which the server listens: a TCP port or a Unix domain socket."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from engine.core.config import ServerConfig
from engine.core.errors import ConfigError
from engine.server.shared.authority import authority


@contextmanager
def bound(config: ServerConfig) -> Iterator[socket.socket]:
    """Bind the socket, and close it at the end. Raises ConfigError when the address cannot be used."""
    if not config.uds:
        with _bind_port(config) as listener:
            yield listener
        return
    with _locked(config.uds), _bind_path(config.uds) as listener:
        try:
            yield listener
        finally:
            Path(config.uds).unlink(missing_ok=True)


def url(listener: socket.socket, config: ServerConfig) -> str:
    """The address for clients; of a Unix domain socket, the path after `unix:`."""
    if config.uds:
        return f"unix:{config.uds}"
    scheme = "https" if config.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{authority(host, port)}"


def _bind_port(config: ServerConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}, port {config.port} ({error.strerror}); "
            "choose another address with --host or --port (0: any free port)"
        ) from None
    return listener


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise _unusable(path, error) from None
    return listener


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Lock a path, since a socket does not show that its server is still loading. Raises ConfigError."""
    file = Path(f"{path}.lock")
    with ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(file.open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _unusable(path, error) from None
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _unusable(path: str, error: OSError) -> ConfigError:
    reason = "another server uses it" if isinstance(error, BlockingIOError) else error.strerror or error
    return ConfigError(f"cannot listen on the socket {path} ({reason}); choose another path with --uds")


def _remove_stale(path: str) -> None:
    """Remove a socket that a killed server has left; keep one that a server listens on, and any other file."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
