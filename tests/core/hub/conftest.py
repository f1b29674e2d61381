from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from engine.core.hub import download

from .hub_server import Hub, running_hub


@pytest.fixture(scope="package")
def servers() -> Iterator[Hub]:
    """A local hub for all tests of this folder."""
    with running_hub() as hub:
        yield hub
    close_session()


@pytest.fixture
def hub(servers: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The local hub, empty, as the one that huggingface_hub asks in this process, with an empty cache and no token.

    Waits at the end for the threads that download, which outlive a failed download and ask the next test's hub.
    """
    servers.reset()
    monkeypatch.setattr(constants, "ENDPOINT", servers.url)  # huggingface_hub reads the environment when it is imported
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", servers.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.0)
    yield servers
    for thread in threading.enumerate():
        if thread.name == "download":
            thread.join(30)
            assert not thread.is_alive()
