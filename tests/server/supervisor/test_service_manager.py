from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from engine.server.supervisor.service_manager import ADDRESS, notify


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What systemd listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        monkeypatch.setenv(ADDRESS, str(tmp_path / "notify"))
        yield listening


def test_systemd_is_notified_when_the_server_is_ready_and_when_it_stops(
    manager: socket.socket, serve_fake: Callable[..., AbstractContextManager[Any]]
) -> None:
    with serve_fake() as server:
        assert manager.recv(100) == b"READY=1"
        assert server.stop() == 0
        assert manager.recv(100) == b"STOPPING=1"


def test_an_abstract_socket_is_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("")  # the kernel chooses an abstract name
        listening.settimeout(30)
        monkeypatch.setenv(ADDRESS, "@" + listening.getsockname()[1:].decode())
        notify("READY=1")
        assert listening.recv(100) == b"READY=1"


def test_nothing_happens_without_systemd_and_a_dead_socket_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    notify("READY=1")
    assert not caplog.records
    monkeypatch.setenv(ADDRESS, str(tmp_path / "nobody"))
    with caplog.at_level(logging.WARNING):
        notify("READY=1")
    assert "systemd could not be notified of READY=1" in caplog.text
