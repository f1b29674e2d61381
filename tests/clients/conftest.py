"""Servers for tests of API clients. `make clients` installs the clients and runs these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from outcomes import Recorder
from servers import Scripts, Server, start_demo, start_scripted


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --outcomes."""
    parser.addoption("--outcomes", type=Path, help="file that keeps the outcomes for docs/clients.md")


def pytest_configure(config: pytest.Config) -> None:
    """Keep outcomes if asked to."""
    if (file := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(Recorder(file))


@pytest.fixture(scope="session")
def _scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Scripts]]:
    server, scripts = start_scripted(tmp_path_factory.mktemp("scripted"))
    yield server, scripts
    assert server.stop() == 0
    assert "ERROR" not in server.errors, server.errors


@pytest.fixture(scope="session")
def scripted(_scripted: tuple[Server, Scripts]) -> Server:
    """The server that answers with scripts: its model writes what `script` was given."""
    return _scripted[0]


@pytest.fixture(scope="session")
def script(_scripted: tuple[Server, Scripts]) -> Scripts:
    """Called with the texts of the answers of a conversation, returns a word that its first message must contain."""
    return _scripted[1]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of the demo model, which writes stories unless a grammar makes it write something else."""
    server = start_demo(tmp_path_factory.mktemp("demo"))
    yield server
    assert server.stop() == 0
    assert "ERROR" not in server.errors, server.errors
