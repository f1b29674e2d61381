"""What a start allows next to CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from engine.core.config.tree import EngineConfig, ModelConfig
from engine.core.device import DeviceInfo
from engine.core.runner.start_graphs import GraphStart


def graph_start(*, states: tuple[Any, ...] = (), **executor: Any) -> GraphStart:
    config = EngineConfig(model=ModelConfig(path="unused"))
    config = evolve(
        config,
        executor=evolve(config.executor, **executor),
        scheduler=evolve(config.scheduler, max_batch_tokens=8192),
    )
    layout: Any = SimpleNamespace(states=states)
    rest: dict[str, Any] = {"hidden_size": 64, "dtype": "bfloat16", "max_len": 128, "fused": True, "speculates": False}
    return GraphStart(config=config, device=DeviceInfo(type="cpu"), layout=layout, **rest)


@pytest.mark.parametrize(
    ("executor", "rows"),
    [
        ({}, 8192),
        ({"graphs": "on"}, 8192),
        ({"graphs": "on", "max_graph_tokens": 6144}, 6144),
        ({"max_graph_tokens": 16384}, 8192),
        ({"graphs": "decode"}, 0),
        ({"graphs": "off", "max_graph_tokens": 6144}, 0),
    ],
)
def test_sums_of_four_ranks_run_next_to_computation_in_steps_that_may_have_graphs(
    executor: dict[str, Any], rows: int
) -> None:
    assert graph_start(**executor).max_overlapped_rows(4) == rows
    assert graph_start(**executor).max_overlapped_rows(2) == 8192, "two ranks launch few more operations"


def test_sums_of_four_ranks_are_all_reduces_where_layers_keep_a_state() -> None:
    assert graph_start(states=(object(),)).max_overlapped_rows(4) == 0
