"""What the tests of both sweeps of shapes use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module sweep_cases; other modules of benchmarks/ can then be imported, too."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import sweep_cases  # type: ignore[import-not-found]

    return sweep_cases


@pytest.fixture
def limits(cases: Any) -> Any:
    """What a GPU can do, in round numbers."""
    return cases.Limits(bandwidth=4e12, flops=8e14, flops_8bit=16e14)
