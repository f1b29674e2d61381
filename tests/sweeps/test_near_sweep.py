"""benchmarks/near_sweep.py: round sizes, near neighbours, searches, and a run by the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def near(cases: Any) -> Any:
    import sweep_near  # type: ignore[import-not-found]

    return sweep_near


@pytest.mark.parametrize(
    ("size", "down", "up"),
    [
        (4096, 4096, 4096),
        (4097, 4096, 4608),
        (4736, 4608, 5120),
        (8832, 8192, 9216),
        (33, 32, 36),
        (7, 7, 7),
        (1, 1, 1),
    ],
)
def test_sizes_are_rounded_to_eighths_of_the_power_of_two_below(near: Any, size: int, down: int, up: int) -> None:
    assert (near.round_down(size), near.round_up(size)) == (down, up)


def test_round_sizes_before_and_after_a_power_of_two_have_different_distances(near: Any) -> None:
    assert (near.below(4096), near.above(4096)) == (3840, 4608)
    assert (near.below(1024, 128), near.above(1024, 128)) == (896, 1152)


def test_floors_of_the_neighbours_enclose_that_of_the_case(cases: Any, near: Any, limits: Any) -> None:
    for seed in range(4):
        for drawn in cases.draw(seed, 30, cases.Space()):
            case = near.measured_case(drawn)
            low, high = near.near_neighbours(case)
            assert case not in (low, high)
            assert low.floor(limits) <= case.floor(limits) <= high.floor(limits)
            assert low.floor(limits) < high.floor(limits) < 2 * low.floor(limits)


def test_round_cases_lie_between_the_round_sizes_before_and_after(cases: Any, near: Any, limits: Any) -> None:
    for drawn in cases.draw(0, 30, cases.Space()):
        case = near.round_case(near.measured_case(drawn))
        assert near.round_case(case) == case
        low, high = near.near_neighbours(case)
        assert low.floor(limits) < case.floor(limits) < high.floor(limits)


def test_quantized_layers_of_few_rows_are_measured_as_their_block(cases: Any, near: Any) -> None:
    model = cases.Model(hidden=2752, intermediate=15040, attention=cases.Heads(heads=21, kv_heads=7, head_dim=128))
    layer = cases.LinearCase(kind="fp8", shape=model.linears["down"], rows=8, model=model)
    block = near.measured_case(layer)
    assert block.linears == model.linears
    assert block.name == "fp8 2752x15040, 8 rows, in its block"
    grouped = near.measured_case(evolve(layer, kind="4bit"))
    assert all(shape.inputs % 128 == 0 for shape in grouped.linears.values())
    assert near.measured_case(evolve(layer, rows=9)) == evolve(layer, rows=9)
    assert near.measured_case(evolve(layer, kind="bf16")).kind == "bf16"


def test_decode_launches_are_searched_with_contexts_that_do_not_depend_on_the_case(cases: Any, near: Any) -> None:
    import sweep_search_attention  # type: ignore[import-not-found]

    heads = cases.Heads(heads=32, kv_heads=8, head_dim=128)
    case = cases.AttentionCase(kind="decode", shape=heads, lengths=(1000, 500))
    found = [one.lengths for one in sweep_search_attention.decode_searches(case)]
    assert found == [(288, 144), (1448, 724), (7296, 3648)]
    many = evolve(case, lengths=(1000,) * 200)  # 512 MiB hold 655 tokens of each
    assert [one.lengths[0] for one in sweep_search_attention.decode_searches(many)] == [288, 655]


TIMES = {"qkv": {"a": 2.0, "b": 1.0}, "down": {"a": 5.0, "b": 4.0, "c": 3.0}}
"""Seconds of a block's layers by their tiles."""


def make_block(blocks: Any, mixed: float) -> Any:
    """A block whose time is the sum of its layers', and `mixed` more with different tiles."""
    block = object.__new__(blocks.Block)
    block.rule = block.chosen = {"qkv": "a", "down": "a"}
    block._x, block.dtype = torch.zeros(1), torch.float32
    block.tiles = lambda role: list(TIMES[role])
    block._tensor_core_tile = lambda role: "b"

    def seconds(chosen: Any = None) -> float:
        used = chosen or block.chosen
        return sum(TIMES[role][tile] for role, tile in used.items()) + mixed * (len(set(used.values())) > 1)

    block.case = SimpleNamespace(rows=1)
    block.chain = SimpleNamespace(shapes=dict.fromkeys(TIMES, (1, 1)), multiply=lambda role, tile, x: x)
    block.seconds = seconds
    return block


@pytest.mark.parametrize(("mixed", "found"), [(0.0, {"qkv": "b", "down": "c"}), (9.0, {"qkv": "b", "down": "b"})])
def test_search_of_a_block_finds_the_fastest_tiles_and_mixes_kernels_only_where_that_is_faster(
    cases: Any, near: Any, mixed: float, found: dict[str, str]
) -> None:
    import sweep_blocks  # type: ignore[import-not-found]

    block = make_block(sweep_blocks, mixed)
    block.search()
    assert block.chosen == found


@pytest.mark.interpreter
def test_searched_layer_multiplies_its_rows_by_the_fastest_candidate(
    cases: Any, near: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sweep_linears  # type: ignore[import-not-found]
    import sweep_search  # type: ignore[import-not-found]
    import sweep_timing  # type: ignore[import-not-found]

    from engine.plugins.quant.w4a16_kernel import W4A16Kernel
    from engine.plugins.quant.weight_only_tuning import WeightOnlyOp

    monkeypatch.setattr(W4A16Kernel, "prepare", W4A16Kernel.pack_weights)  # as on a GPU
    candidates = WeightOnlyOp.candidates
    monkeypatch.setattr(WeightOnlyOp, "candidates", lambda self, rows: candidates(self, rows)[:2])
    monkeypatch.setattr(WeightOnlyOp, "refine", lambda self, rows, ranked: [])
    case = cases.LinearCase(kind="4bit", shape=cases.LinearShape(outputs=64, inputs=256), rows=20)
    with torch.inference_mode():
        sweep = sweep_linears.LinearSweep("4bit", "cpu:0", "float16", sweep_timing.ClockTimer(), [case])
        search = sweep_search.case_search(sweep, case)
        assert search.row_class == 32
        times = {str(tile): float(number) for number, tile in enumerate(reversed(search.candidates()))}
        monkeypatch.setattr(sweep_search, "FINALISTS", 0)
        made = search.calls_by
        monkeypatch.setattr(search, "calls_by", lambda tile: [made(tile)[0], times[str(tile)]])
        found = search.search(lambda calls: calls[1])
        assert list(found.values()) == [0.0, 1.0]
        fastest = next(iter(found))
        assert search.chosen != fastest
        search.use(fastest)
        assert search.chosen == fastest
        assert sweep.error(case) < 0.01


def test_search_without_a_candidate_that_runs_is_an_error_that_the_sweep_reports(cases: Any, near: Any) -> None:
    import sweep_search  # type: ignore[import-not-found]

    class Search(sweep_search.LayerSearch):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rows, self.op, self._times = 5, SimpleNamespace(key="4096x4096", refine=lambda *_: []), {}

        row_class = 8

        def candidates(self) -> list[Any]:
            return []

        def compile(self, candidates: Any) -> None:
            pass

    with pytest.raises(RuntimeError, match="no candidate for 5 rows of 4096x4096 runs"):
        Search().search(lambda calls: 1.0)


@pytest.mark.parametrize("part", ["0/2", "3/2", "-1/2", "1", "a/b"])
def test_a_part_outside_the_number_of_parts_is_refused(part: str) -> None:
    command = [sys.executable, str(SCRIPTS / "near_sweep.py"), f"--part={part}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"argument --part: '{part}' is not a part; give I/N with I from 1 to N" in done.stderr


def test_cases_run_and_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPTS / "near_sweep.py"), "--small", "--bandwidth=0.02", "--matmul=0.1"]
    command += ["--cases=7", "--only", "decode", "prefill", "--json", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["benchmark"] == "near_sweep"
    metrics: dict[str, dict[str, float]] = {}
    for row in written["rows"]:
        metrics.setdefault(row["case"], {})[row["metric"]] = row["value"]
    assert len(metrics) == 2
    assert all(found["time"] > 0 and found["time over predicted time"] > 0 for found in metrics.values())
    assert all("regret" in found for found in metrics.values())
