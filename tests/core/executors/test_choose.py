"""The choice of plugins, where one that is chosen first cannot be constructed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.runner.start import RunnerStart
from engine.core.startup import Phases
from engine.plugins.attention.torch import TorchAttention
from tests.core.plugin_host.faulty import offering, raising


def test_choose_starts_without_tensors_of_the_failed_start_when_auto_passes_over_a_plugin(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, count_tensors: Callable[[], int]
) -> None:
    """Else a GPU's KV cache would be sized with the weights loaded twice."""
    found: list[int] = []
    run = RunnerStart.run

    def counting(start: RunnerStart, phases: Phases) -> Any:
        found.append(count_tensors())
        return run(start, phases)

    monkeypatch.setattr(RunnerStart, "run", counting)
    make_engine(offering("attention", type("Faulty", (TorchAttention,), {"__init__": raising()}), preference=99))
    first, second = found
    assert first == second
