from __future__ import annotations

import pytest

from engine.core.runner import graph_capture, start_graphs
from tests.core.runner.replays import ReplayByRunning


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> type[ReplayByRunning]:
    """Decode steps are replayed on a CPU, where a configuration asks for graphs."""
    monkeypatch.setattr(graph_capture, "GraphCapturer", ReplayByRunning)
    monkeypatch.setattr(
        start_graphs, "use_graphs", lambda config, attention, model, device: config.executor.graphs != "off"
    )
    ReplayByRunning.captured = 0
    return ReplayByRunning
