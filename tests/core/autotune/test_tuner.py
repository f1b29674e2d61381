"""The tuner: measurement decides, and results on disk are not measured again."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from engine.core.autotune.cache import TuningCache, default_directory
from engine.core.autotune.task import CandidateError
from engine.core.autotune.tuner import collect_tasks, tune_tasks
from engine.core.errors import ExecutorError
from engine.core.layers import LayerFactory
from engine.core.layers.linear import Linear
from engine.core.layers.skinny_linear import ROW_CLASSES, SkinnyGemms, SkinnyKernel
from engine.core.quant.base import LinearPart, LinearSpec
from engine.ops.gemm.skinny_launch import HEAD_MAX_ROWS, SKINNY_MAX_ROWS

MACHINE = {"device": "GPU 1 / 80 GB", "pytorch": "1", "triton": "2"}


class FakeTimer:
    """Torch takes 10; a tile what `rule` says."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.prepared = []
        self.asked = []

    def prepare(self, wanted: Any) -> None:
        self.prepared += [(task.key, one) for task, candidates in wanted for one in candidates]

    def seconds(self, task: Any, candidate: Any) -> Any:
        self.asked.append((task.key, candidate))
        return 10.0 if candidate is None else self.rule(task.op.shape, task.rows, candidate)


def model() -> Any:
    layers = LayerFactory(dtype="bfloat16", device="cpu", fused=True)
    for index in range(2):
        layers.linear([(f"{index}.qkv", 96)], 64, bias=True)
        layers.linear([(f"{index}.gate", 80), (f"{index}.up", 80)], 64, gated=True)
    layers.lm_head("lm_head", 200, 64)
    for layer in layers.layers:
        layer.fill({name: torch.zeros(spec.shape, dtype=torch.bfloat16) for name, spec in layer.tensors().items()})
    return layers


def run(layers: Any, tmp_path: Any, rule: Any, machine: Any = MACHINE) -> Any:
    timer = FakeTimer(rule)
    return tune_tasks(collect_tasks(layers), TuningCache(tmp_path, machine), timer), timer


def tables(layers: Any, start: Any) -> Any:
    """The launches of the op whose key starts with `start`."""
    [found] = {id(task.op): task.op for task in collect_tasks(layers) if task.key[0].startswith(start)}.values()
    return found.launches


def test_collect_tasks_groups_layers_of_one_shape() -> None:
    tasks = collect_tasks(model())
    assert {task.key: len(task.operands) for task in tasks} == {
        (key, rows): count
        for rows in ROW_CLASSES
        for key, count in {
            "plain 96x64 bfloat16": 2,
            "gated 80x64 bfloat16": 2,
            "argmax 200x64 bfloat16": 1,
        }.items()
        if not key.startswith("argmax") or rows <= HEAD_MAX_ROWS
    }
    assert all(len(task.ops) == 1 for task in tasks)
    biased = {task.key[0] for task in tasks if task.operands[0].bias is not None}
    assert biased == {"plain 96x64 bfloat16"}


def test_operands_lack_a_bias_that_is_added_after_the_all_reduce() -> None:
    spec = LinearSpec(
        parts=(LinearPart(name="o", out_features=8),), in_features=16, bias=True, dtype="bfloat16", parallel="row"
    )
    for reduce, biased in ((None, True), (lambda y: y, False)):
        layer = Linear(spec, SkinnyKernel(spec, SkinnyGemms("cpu")), reduce)
        layer.fill({"o.weight": torch.zeros(8, 16), "o.bias": torch.zeros(8)})
        [one] = layer.autotuned_calls()
        assert (one.operands.bias is not None) == biased


def test_tune_tasks_chooses_the_fastest_and_torch_where_nothing_gains(tmp_path: Path) -> None:
    def rule(gemm_shape: Any, rows: Any, tile: Any) -> Any:
        if gemm_shape.epilogue == "argmax":
            return 9.95  # less than a hundredth
        if gemm_shape.epilogue == "gated":
            raise CandidateError("it is too large")
        return 5.0 if (tile.rows, tile.block_k) == (32, 256) else 6.0

    layers = model()
    report, timer = run(layers, tmp_path, rule)
    assert report.measured == len(report.results) == len(collect_tasks(layers))
    assert timer.prepared == timer.asked
    assert tables(layers, "gated") == [None] * (SKINNY_MAX_ROWS + 1)
    assert tables(layers, "argmax") == [None] * (HEAD_MAX_ROWS + 1)
    plain = tables(layers, "plain 96")
    for rows in (3, 4, 8, 16):  # for fewer that tile is no candidate
        assert (plain[rows].tile.rows, plain[rows].tile.block_k) == (32, 256)
    assert plain[1] is not None
    assert {result.default for result in report.results} == {"library"}
    assert {result.default_seconds for result in report.results} == {10.0}
    assert {result.seconds for result in report.results if result.op.startswith("gated")} == {10.0}


def test_prefetching_is_tried_with_the_fastest_tile_only(tmp_path: Path) -> None:
    report, timer = run(model(), tmp_path, lambda gemm_shape, rows, tile: 5.0 - tile.rows / 1000 - tile.ahead / 1e6)
    for result in report.results:
        tried = [tile for place, tile in timer.asked if place == (result.op, result.rows)][1:]
        ahead = [tile for tile in tried if tile.ahead]
        assert ahead
        assert {tile.rows for tile in ahead} == {max(tile.rows for tile in tried)}
        assert result.candidate == str(max(ahead, key=lambda tile: tile.ahead))


def test_a_candidate_that_cannot_run_is_logged_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def rule(gemm_shape: Any, rows: Any, tile: Any) -> Any:
        if tile.rows == 64:
            raise CandidateError("out of shared memory")
        return 1.0

    with caplog.at_level(logging.DEBUG):
        report, _ = run(model(), tmp_path, rule)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert any(
        "gated 80x64 bfloat16, 8 rows: matrix 64x128" in text and "out of shared memory" in text for text in said
    )
    kernels = {result.rows: result.candidate for result in report.results if result.op.startswith("gated")}
    assert kernels[1] == "library"  # of few rows no other is a candidate
    assert kernels[8].startswith("matrix")


def test_tune_tasks_chooses_the_fastest_tile_where_torch_cannot_run(tmp_path: Path) -> None:
    class WithoutTorch(FakeTimer):
        def seconds(self, task: Any, candidate: Any) -> Any:
            if candidate is None:
                raise CandidateError("no such type")
            return super().seconds(task, candidate)

    layers = model()
    cache = TuningCache(tmp_path, MACHINE)
    report = tune_tasks(collect_tasks(layers), cache, WithoutTorch(lambda gemm_shape, rows, tile: 20.0 + tile.rows))
    assert {result.default_seconds for result in report.results} == {float("inf")}
    assert [tables(layers, "gated")[rows].tile.rows for rows in (1, 8)] == [64, 16]
    assert dict(cache.load()) == {(result.op, result.rows): result for result in report.results}


def test_stored_results_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    cache, plain = TuningCache(tmp_path / "cache", MACHINE), tmp_path / "plain"
    cache.store({})
    plain.touch()
    assert [oct(file.stat().st_mode) for file in (tmp_path / "cache").iterdir()] == [oct(plain.stat().st_mode)]


def test_tune_tasks_raises_where_no_candidate_runs(tmp_path: Path) -> None:
    class Broken(FakeTimer):
        def seconds(self, task: Any, candidate: Any) -> None:
            raise CandidateError(f"no {candidate}")

    with pytest.raises(
        ExecutorError, match=r"none of \d+ kernels for plain 96x64 bfloat16 at 1 rows.*library: no None"
    ):
        tune_tasks(collect_tasks(model()), TuningCache(tmp_path, MACHINE), Broken(None))
    assert not list(tmp_path.iterdir())


def test_cached_results_are_not_measured_again(tmp_path: Path) -> None:
    first, _ = run(model(), tmp_path, lambda gemm_shape, rows, tile: 1.0 + tile.rows / 1000 - tile.ahead / 1e6)
    layers = model()
    layers.linear([("new", 48)], 64).fill({"new.weight": torch.zeros(48, 64, dtype=torch.bfloat16)})
    second, timer = run(layers, tmp_path, lambda gemm_shape, rows, tile: 1.0 + tile.rows / 1000)
    assert second.measured == len(ROW_CLASSES)
    assert {key for (key, _), _ in timer.asked} == {"plain 48x64 bfloat16"}
    assert set(first.results) < set(second.results)
    layers = model()
    third, timer = run(layers, tmp_path, None)
    assert third.measured == 0
    assert not timer.asked
    assert not timer.prepared
    assert third.results == first.results
    for result in third.results:
        assert str(tables(layers, result.op)[result.rows].tile) == result.candidate
        assert result.candidate.endswith("bytes ahead")
        assert not result.candidate.endswith(", 0 bytes ahead")


@pytest.mark.parametrize("change", [{"version": "old"}, {"candidate": "a tile that is no candidate any more"}])
def test_an_outdated_result_is_measured_again(tmp_path: Path, change: Any) -> None:
    def rule(gemm_shape: Any, rows: Any, tile: Any) -> Any:
        return 1.0 + tile.rows / 1000

    first, _ = run(model(), tmp_path, rule)
    cache = TuningCache(tmp_path, MACHINE)
    known = dict(cache.load())
    place = ("gated 80x64 bfloat16", 8)
    known[place] = evolve(known[place], **change)
    cache.store(known)
    second, timer = run(model(), tmp_path, rule)
    assert second.measured == 1
    assert {asked for asked, _ in timer.asked} == {place}
    assert second.results == first.results
    assert run(model(), tmp_path, None)[0].measured == 0


def test_each_machine_has_its_own_file(tmp_path: Path) -> None:
    run(model(), tmp_path, lambda gemm_shape, rows, tile: 1.0)
    for key in MACHINE:
        report, _ = run(model(), tmp_path, lambda gemm_shape, rows, tile: 1.0, {**MACHINE, key: "other"})
        assert report.measured
    assert len(list(tmp_path.iterdir())) == 1 + len(MACHINE)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"machine": {**MACHINE, "pytorch": "9"}, "results": []}),
        json.dumps({"machine": MACHINE, "results": [{"rows": 1}]}),
        json.dumps({"machine": MACHINE, "results": 3}),
        "\xff",
    ],
)
def test_an_unreadable_file_is_replaced_with_a_warning(
    content: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = TuningCache(tmp_path, MACHINE)
    cache.path.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        report, _ = run(model(), tmp_path, lambda gemm_shape, rows, tile: 1.0)
    assert report.measured
    assert str(cache.path) in caplog.text
    caplog.clear()
    assert len(cache.load()) == report.measured
    assert not caplog.text


def test_an_unwritable_directory_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    layers = model()
    report, _ = run(layers, blocked / "kernels", lambda gemm_shape, rows, tile: 1.0)
    assert report.measured
    assert tables(layers, "gated")[1] is not None
    assert "measures again" in caplog.text


def test_the_default_directory_follows_xdg_cache_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_directory() == Path("/somewhere/engine/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == Path.home() / ".cache" / "engine" / "kernels"


@pytest.mark.gpu
def test_tune_measures_each_row_class_once_on_a_gpu(tmp_path: Path) -> None:
    from engine.core.autotune.tuner import tune

    layers = LayerFactory(dtype="bfloat16", device="cuda", fused=True)
    hidden, intermediate = 1088, 2944  # sizes without shipped results, which would not be measured again
    linear = layers.linear([("gate", intermediate), ("up", intermediate)], hidden, gated=True)
    head = layers.lm_head("lm_head", 32000, hidden)
    for layer in layers.layers:
        names = layer.tensors().items()
        layer.fill({name: torch.randn(spec.shape).to("cuda", torch.bfloat16) / 32 for name, spec in names})
    with torch.inference_mode():
        report = tune(layers, str(tmp_path))
        measured_for_head = [rows for rows in ROW_CLASSES if rows <= HEAD_MAX_ROWS]
        assert report.measured == len(ROW_CLASSES) + len(measured_for_head)
        assert all(0 < result.seconds < 1e-3 for result in report.results)
        assert tune(layers, str(tmp_path)).measured == 0
        for rows in (1, 3, 16, 17):
            x = torch.randn(rows, hidden, device="cuda").bfloat16()
            exact = x.double() @ linear.weights["weight"].double().T
            gate, up = exact.chunk(2, -1)
            exact = torch.nn.functional.silu(gate) * up
            assert float((linear.gated(x).double() - exact).norm() / exact.norm()) < 2**-7
            logits = x.double() @ head.weight.double().T
            chosen = logits.gather(-1, head.greedy(x)[1][:, None])[:, 0]
            torch.testing.assert_close(chosen, logits.amax(-1), rtol=2**-7, atol=2**-7)
