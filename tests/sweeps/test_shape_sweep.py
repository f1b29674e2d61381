"""benchmarks/shape_sweep.py: what it draws, neighbours, floors and predicted times, and a run by the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ("--small", "--bandwidth=0.02", "--matmul=0.1")


@pytest.fixture
def neighbours(cases: Any) -> Any:
    import sweep_neighbours  # type: ignore[import-not-found]

    return sweep_neighbours


def run_sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "shape_sweep.py"), *SMALL, *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_drawing_is_reproducible_and_differs_by_seed(cases: Any) -> None:
    space = cases.Space()
    assert cases.draw(3, 30, space) == cases.draw(3, 30, space)
    assert cases.draw(3, 30, space) != cases.draw(4, 30, space)
    assert cases.draw(3, 30, space)[:10] == cases.draw(3, 10, space)


def test_thirty_cases_have_every_kind_at_few_and_many_rows(cases: Any) -> None:
    drawn = cases.draw(0, 30, cases.Space())
    counts = {kind: sum(case.kind == kind for case in drawn) for kind in cases.KINDS}
    assert counts == {kind: 5 if kind in cases.KINDS[:2] else 4 for kind in cases.KINDS}
    for kind in ("fp8", "int8", "4bit"):
        rows = [case.rows for case in drawn if case.kind == kind]
        assert min(rows) <= 32 < max(rows)


def test_models_are_within_what_users_run(cases: Any) -> None:
    import random

    for number in range(300):
        model = cases.Space().draw_model(random.Random(number))
        heads = model.attention
        assert 1024 <= model.hidden <= 8192
        assert model.hidden % 64 == 0
        assert 2.4 < model.intermediate / model.hidden < 5.6
        assert model.intermediate % 64 == 0
        assert heads.head_dim in (64, 128)
        assert heads.heads % heads.kv_heads == 0
        assert 1 <= heads.heads // heads.kv_heads <= 8
        assert 0.6 < heads.heads * heads.head_dim / model.hidden < 1.6


def test_cases_are_within_their_limits(cases: Any) -> None:
    for case in cases.draw(1, 300, cases.Space()):
        if isinstance(case, cases.AttentionCase):
            assert len(case.lengths) <= (8 if case.kind == "prefill" else 256)
            assert min(case.lengths) >= 1
            assert max(case.lengths) <= (4096 if case.kind == "prefill" else 16384)
            assert case.cache_bytes <= cases.MAX_CACHE_BYTES or max(case.lengths) <= 128
        else:
            assert 1 <= case.rows <= (16 if case.kind == "bf16" else 2048)
            assert case.shape.inputs % (128 if case.kind == "4bit" else 64) == 0


def test_linear_layers_of_the_known_models_are_those_of_the_other_benchmarks(cases: Any) -> None:
    models = sys.modules["models"]
    for name, linears in models.LINEARS.items():
        found = cases.Model.from_config(models.MODELS[name]).linears
        assert {role: shape.sizes for role, shape in found.items()} == linears


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "near"),
    [
        (4736, 5120, False, [(4096, 4096), (5120, 5120)]),
        (900, 2000, False, [(1024, 2048)]),  # no known layer is smaller
        (6144, 19968, False, [(5120, 17408), (5120, 25600)]),
        (8832, 1344, True, [(6144, 1024), (12288, 2048)]),
        (90112, 8192, True, [(51200, 5120)]),  # nor larger
        (4096, 4096, False, [(4096, 4096), (5120, 5120)]),
    ],
)
def test_neighbours_of_a_linear_layer_are_the_nearest_smaller_and_larger_ones(
    outputs: int, inputs: int, gated: bool, near: list[tuple[int, int]], cases: Any, neighbours: Any, limits: Any
) -> None:
    shape = cases.LinearShape(outputs=outputs, inputs=inputs, gated=gated)
    case = cases.LinearCase(kind="fp8", shape=shape, rows=100)
    found = neighbours.find_neighbours(case, cases.Space(), limits)
    assert [one.shape.sizes for one in found] == near
    assert {(one.kind, one.rows, one.shape.gated) for one in found} == {("fp8", 100, gated)}


@pytest.mark.parametrize(
    ("kind", "lengths", "near"),
    [
        ("decode", (700, 900, 800), "40/8x128, 2 x up to 1014"),  # 18 KV heads and 16, the same bytes
        ("decode", (700,), "40/8x128, 1 x up to 524"),
        ("prefill", (700, 900, 800), "40/8x128, 3 x up to 853"),  # 108 query heads and 120, the same operations
    ],
)
def test_neighbour_of_attention_has_as_much_work_in_about_as_many_heads(
    kind: str, lengths: tuple[int, ...], near: str, cases: Any, neighbours: Any, limits: Any
) -> None:
    shape = cases.Heads(heads=36, kv_heads=6, head_dim=128)
    case = cases.AttentionCase(kind=kind, shape=shape, lengths=lengths)
    [found] = neighbours.find_neighbours(case, cases.Space(), limits)
    assert found.near_name == near
    assert found.floor(limits) == pytest.approx(case.floor(limits), rel=2e-3)


def test_known_shapes_are_predicted_from_other_known_shapes(cases: Any, neighbours: Any, limits: Any) -> None:
    space = cases.Space(control=True)
    known = {shape for model in space.known() for shape in (*model.linears.values(), model.attention)}
    drawn = cases.draw(0, 70, space)
    assert {case.shape for case in drawn} <= known
    for case in drawn:
        near = neighbours.find_neighbours(case, space, limits)
        assert all(one.shape != case.shape for one in near)
        if isinstance(case, cases.AttentionCase):
            assert near[0].shape.head_dim == case.shape.head_dim


def test_floors_equal_those_computed_by_hand(cases: Any, limits: Any) -> None:
    square = cases.LinearShape(outputs=4096, inputs=4096)
    quantized = cases.LinearCase(kind="fp8", shape=square, rows=64)
    # the norm moves 64 * 4096 * 3 bytes; the product 4096^2 + 4 * 4096 + 64 * 4096 * (1 + 2)
    assert quantized.floor(limits) == pytest.approx((786_432 + 17_580_032) / 4e12)
    many = cases.LinearCase(kind="fp8", shape=square, rows=2048)
    assert many.floor(limits) == pytest.approx(2048 * 4096 * 3 / 4e12 + 2 * 2048 * 4096**2 / 16e14)
    gated = cases.LinearCase(kind="bf16", shape=cases.LinearShape(outputs=8192, inputs=1024, gated=True), rows=2)
    assert gated.floor(limits) == pytest.approx((2 * 8192 * 1024 + 2 * (1024 * 6 + 4096 * 2)) / 4e12)
    heads = cases.Heads(heads=16, kv_heads=8, head_dim=128)
    decode = cases.AttentionCase(kind="decode-float8", shape=heads, lengths=(100, 200))
    assert decode.floor(limits) == pytest.approx((2 * 300 * 1024 + 4 * 2 * 2048) / 4e12)
    prefill = cases.AttentionCase(kind="prefill", shape=heads, lengths=(4000,))
    assert prefill.floor(limits) == pytest.approx(4 * 2048 * 8_002_000 / 8e14)


def test_predicted_time_next_to_one_neighbour_is_the_fixed_time_and_a_multiple_of_the_floor(neighbours: Any) -> None:
    assert neighbours.predicted(10.0, [(5.0, 14.0)], fixed=4.0) == 4 + 2 * 10
    assert neighbours.predicted(10.0, [(5.0, 5.0)], fixed=4.0) == 4 + 1 * 10


def test_predicted_time_between_two_neighbours_is_on_the_line_between_their_times(neighbours: Any) -> None:
    near = [(5.0, 14.0), (15.0, 20.0)]
    assert neighbours.predicted(5.0, near, fixed=4.0) == 14
    assert neighbours.predicted(10.0, near, fixed=4.0) == 17


def test_ratio_and_regret_of_a_result(cases: Any, limits: Any) -> None:
    import shape_sweep  # type: ignore[import-not-found]

    heads = cases.Heads(heads=16, kv_heads=8, head_dim=128)
    near = cases.AttentionCase(kind="decode", shape=heads, lengths=(1000,))
    case = cases.AttentionCase(kind="decode", shape=heads, lengths=(2000,))
    floor = near.floor(limits)
    result = shape_sweep.Result(
        case=case,
        neighbours=[near],
        limits=limits,
        seconds=3 * floor + 1e-6,
        near_seconds=[1.5 * floor + 1e-6],
        fixed_seconds=1e-6,
        error=0.001,
        choices={"chosen": 3e-6, "better": 2e-6, "worse": 4e-6},
    )
    assert result.ratio == pytest.approx((3 * floor + 1e-6) / (1.5 * case.floor(limits) + 1e-6))
    assert result.regret == 1.5
    rows = {row.metric: row for row in result.rows()}
    assert rows[shape_sweep.REGRET].baseline_name == "better, instead of chosen"
    assert rows[shape_sweep.TIME].share == pytest.approx(case.floor(limits) / result.seconds)
    assert shape_sweep.summary([result]).startswith("1 of 1 within 5% of the predicted time")


def test_short_sequences_of_calls_are_repeated_in_a_graph(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sweep_timing  # type: ignore[import-not-found]

    made: list[str] = []
    timer = object.__new__(sweep_timing.GpuTimer)
    monkeypatch.setattr(timer, "replayed", lambda calls: calls() or 36.0, raising=False)
    assert timer.per_call([lambda: made.append("a"), lambda: made.append("b"), lambda: made.append("c")]) == 2.0
    assert made == ["a", "b", "c"] * 6


@pytest.mark.interpreter
def test_layers_without_measured_row_classes_have_no_rule_for_many_rows(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sweep_linears
    import sweep_timing

    from engine.plugins.quant.w4a16_kernel import W4A16Kernel
    from engine.plugins.quant.weight_only_tuning import WeightOnlyOp

    monkeypatch.setattr(W4A16Kernel, "prepare", W4A16Kernel.pack_weights)  # as on a GPU
    monkeypatch.setattr(WeightOnlyOp, "row_classes", ())
    case = cases.LinearCase(kind="4bit", shape=cases.LinearShape(outputs=64, inputs=256), rows=300)
    sweep = sweep_linears.LinearSweep("4bit", "cpu:0", "float16", sweep_timing.ClockTimer(), [case])
    assert sweep.layers[case.shape].rule_candidates(300) == []


@pytest.mark.parametrize(("rows", "count"), [(1, 6), (5, 4), (20, 0), (300, 3)])
@pytest.mark.interpreter
def test_outcomes_of_the_rule_of_4_bit_layers_agree(
    rows: int, count: int, cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sweep_linears  # type: ignore[import-not-found]
    import sweep_timing

    from engine.plugins.quant.w4a16_kernel import W4A16Kernel

    monkeypatch.setattr(W4A16Kernel, "prepare", W4A16Kernel.pack_weights)  # as on a GPU
    case = cases.LinearCase(kind="4bit", shape=cases.LinearShape(outputs=64, inputs=256), rows=rows)
    with torch.inference_mode():
        sweep = sweep_linears.LinearSweep("4bit", "cpu:0", "float16", sweep_timing.ClockTimer(), [case])
        layer = sweep.layers[case.shape]
        tiles = layer.rule_candidates(rows)
        assert len(tiles) == count
        results = []
        for tile in tiles:
            torch.manual_seed(0)
            results.append(layer.calls_by(tile, rows)[0]())
        assert sweep.error(case) < 0.01
    for result in results[1:]:
        assert torch.allclose(result, results[0], atol=0.01, rtol=0.01)


def test_cases_run_and_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = run_sweep("--cases=7", "--json", str(file))
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["settings"]["seed"] == 0
    assert " of 7 within 5% of the predicted time" in written["settings"]["summary"]
    metrics: dict[str, dict[str, float]] = {}
    for row in written["rows"]:
        metrics.setdefault(row["case"], {})[row["metric"]] = row["value"]
    assert len(metrics) == 7
    assert all(found["time"] > 0 and found["time over predicted time"] > 0 for found in metrics.values())
    assert sum("regret" in found for found in metrics.values()) == 4


def test_cases_after_the_limit_are_left_out_and_said_so(tmp_path: Path) -> None:
    done = run_sweep("--cases=7", "--only", "decode", "int8", "--limit=0")
    assert done.returncode == 0, done.stderr
    assert "decode: 1 cases are left out" in done.stdout
    assert "int8: 1 cases are left out" in done.stdout


def test_table_of_the_docs_has_the_metrics_of_the_report(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import shape_sweep

    monkeypatch.syspath_prepend(str(SCRIPTS.parent / "scripts"))
    import result_tables  # type: ignore[import-not-found]

    metrics = [
        (shape_sweep.TIME, {"value": 20.0, "share": 0.5}),
        (shape_sweep.NEIGHBOUR, {"value": 10.0, "share": 0.6, "baseline_name": "4096x4096"}),
        (shape_sweep.NEIGHBOUR, {"value": 30.0, "share": 0.7, "baseline_name": "6144x4096"}),
        (shape_sweep.RATIO, {"value": 1.02, "baseline": 19.6}),
        (shape_sweep.REGRET, {"value": 1.01}),
    ]
    report = {
        "machine": "cuda:0 (GPU)",
        "versions": {"torch": "2"},
        "date": "today",
        "commit": "abc",
        "settings": {"summary": "1 of 1", "seed": 0, "ceilings": "copy 4 TB/s"},
        "rows": [{"case": "fp8 5120x4096, 9 rows", "metric": metric, **row} for metric, row in metrics],
    }
    monkeypatch.setattr(result_tables, "load_result", lambda name: report)
    line = "| fp8 5120x4096, 9 rows | 20 | 19.6 | 50% | 4096x4096 (60%); 6144x4096 (70%) | 1.02 | 1.01 |"
    assert line in result_tables.shape_sweep_table()
