"""What a start allows next to CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
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


def max_rows(ranks: int, *, attention: Mapping[str, Any] = {}, model: Mapping[str, Any] = {}, **start: Any) -> int:
    classes: list[Any] = [
        SimpleNamespace(**{"graphs": "decode"} | dict(attention)),
        SimpleNamespace(**{"no_graphs": None} | dict(model)),
    ]
    return graph_start(**start).max_overlapped_rows(ranks, *classes)


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
    assert max_rows(4, **executor) == rows
    assert max_rows(2, **executor) == 8192, "two ranks launch few more operations"


@pytest.mark.parametrize(
    ("attention", "model"),
    [({"graphs": "none"}, {}), ({}, {"no_graphs": "waits for the device"})],
    ids=["attention", "model"],
)
def test_sums_of_four_ranks_are_all_reduces_where_nothing_has_graphs(
    attention: dict[str, Any], model: dict[str, Any]
) -> None:
    assert max_rows(4, attention=attention, model=model) == 0
    assert max_rows(2, attention=attention, model=model) == 8192


def test_sums_of_four_ranks_are_all_reduces_where_layers_keep_a_state() -> None:
    assert max_rows(4, states=(object(),)) == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_sum_runs_next_to_computation_if_the_setting_is_off(ranks: int) -> None:
    assert max_rows(ranks, overlap_sums="off") == 0
