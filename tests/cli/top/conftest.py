from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.top.metrics_server import MetricsServer, metrics_server


@pytest.fixture
def served() -> Iterator[MetricsServer]:
    with metrics_server() as server:
        yield server
