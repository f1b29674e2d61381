"""Choosing kernels: what is measured decides, what is on disk is not measured again."""

import json
import logging
from pathlib import Path

import pytest
import torch

from engine.core.layers import LayerFactory
from engine.core.layers.skinny import BUCKETS
from engine.core.layers.tuning import apply, collect
from engine.core.layers.tuning_cache import TuningCache, default_directory

CPU = torch.device("cpu")
MACHINE = {"device": "GPU 1 / 80 GB", "pytorch": "1", "triton": "2", "kernels": "3"}


class FakeTimer:
    """Torch takes 10; a tile what `rule` says."""

    def __init__(self, rule):
        self.rule = rule
        self.prepared = []
        self.asked = []

    def prepare(self, wanted):
        self.prepared += wanted

    def seconds(self, work, rows, tile):
        self.asked.append((work.few_rows.problem, rows, tile))
        return 10.0 if tile is None else self.rule(work.few_rows.problem, rows, tile)


def model():
    layers = LayerFactory(dtype="bfloat16", device="cpu", fused=True)
    for index in range(2):
        layers.linear([(f"{index}.qkv", 96)], 64, bias=True)
        layers.linear([(f"{index}.gate", 80), (f"{index}.up", 80)], 64, gated=True)
    layers.lm_head("lm_head", 200, 64)
    for layer in layers.layers:
        layer.fill({name: torch.zeros(spec.shape, dtype=torch.bfloat16) for name, spec in layer.tensors().items()})
    return layers


def run(layers, tmp_path, rule, machine=MACHINE):
    timer = FakeTimer(rule)
    return apply(collect(layers), TuningCache(tmp_path, machine), timer, CPU), timer


def table(layers, epilogue):
    [work] = [work for work in collect(layers) if work.few_rows.problem.epilogue == epilogue]
    return work.few_rows.launches


def test_all_layers_of_a_shape_are_one_work():
    works = {str(work.few_rows.problem): len(work.weights) for work in collect(model())}
    assert works == {
        "plain 96x64 bfloat16": 2,
        "gated 80x64 bfloat16": 2,
        "plain 200x64 bfloat16": 1,
        "argmax 200x64 bfloat16": 1,
    }


def test_the_fastest_wins_and_torch_where_nothing_gains(tmp_path):
    def rule(problem, rows, tile):
        if problem.epilogue == "argmax":
            return 9.95  # less than a hundredth
        if problem.epilogue == "gated":
            return float("inf")
        return 5.0 if (tile.rows, tile.block_k) == (32, 256) else 6.0

    layers = model()
    report, timer = run(layers, tmp_path, rule)
    assert report.measured == len(report.choices) == 4 * len(BUCKETS)
    assert len(timer.prepared) == 4 * len(BUCKETS)
    assert table(layers, "gated") == table(layers, "argmax") == [None] * 17
    [plain] = [work for work in collect(layers) if work.few_rows.problem.outputs == 96]
    for rows in (3, 4, 8, 16):  # for fewer that tile is no candidate
        assert (plain.few_rows.launches[rows].tile.rows, plain.few_rows.launches[rows].tile.block_k) == (32, 256)
    assert plain.few_rows.launches[1] is not None
    assert {choice.torch_seconds for choice in report.choices} == {10.0}
    assert {choice.seconds for choice in report.choices if choice.problem.outputs == 80} == {10.0}


def test_fetching_ahead_is_tried_with_the_fastest_tile_only(tmp_path):
    layers = model()
    report, timer = run(layers, tmp_path, lambda problem, rows, tile: 5.0 - tile.rows / 1000 - tile.ahead / 1e6)
    for choice in report.choices:
        tried = [tile for problem, rows, tile in timer.asked if (problem, rows) == (choice.problem, choice.rows)][1:]
        ahead = [tile for tile in tried if tile.ahead]
        assert ahead
        assert {tile.rows for tile in ahead} == {max(tile.rows for tile in tried)}
        assert choice.tile == max(ahead, key=lambda tile: tile.ahead)


def test_what_is_on_disk_is_not_measured_again(tmp_path):
    first, _ = run(model(), tmp_path, lambda problem, rows, tile: 1.0 + tile.rows / 1000)
    layers = model()
    layers.linear([("new", 48)], 64).fill({"new.weight": torch.zeros(48, 64, dtype=torch.bfloat16)})
    second, timer = run(layers, tmp_path, lambda problem, rows, tile: 1.0 + tile.rows / 1000)
    assert second.measured == len(BUCKETS)
    assert {problem.outputs for problem, _, _ in timer.asked} == {48}
    assert set(first.choices) < set(second.choices)
    third, timer = run(layers, tmp_path, None)
    assert third.measured == 0
    assert not timer.asked
    assert not timer.prepared
    assert third.choices == second.choices
    assert table(layers, "gated")[1].tile == next(
        choice.tile for choice in third.choices if (choice.problem.epilogue, choice.rows) == ("gated", 1)
    )


def test_another_machine_has_a_file_of_its_own(tmp_path):
    run(model(), tmp_path, lambda problem, rows, tile: 1.0)
    for key in MACHINE:
        report, _ = run(model(), tmp_path, lambda problem, rows, tile: 1.0, {**MACHINE, key: "other"})
        assert report.measured
    assert len(list(tmp_path.iterdir())) == 1 + len(MACHINE)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({"machine": {**MACHINE, "pytorch": "9"}, "choices": []}),
        json.dumps({"machine": MACHINE, "choices": [{"rows": 1}]}),
        json.dumps({"machine": MACHINE, "choices": 3}),
        "\xff",
    ],
)
def test_a_file_that_cannot_be_used_is_replaced_with_a_warning(content, tmp_path, caplog):
    cache = TuningCache(tmp_path, MACHINE)
    cache.path.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        report, _ = run(model(), tmp_path, lambda problem, rows, tile: 1.0)
    assert report.measured
    assert str(cache.path) in caplog.text
    caplog.clear()
    assert len(cache.load()) == report.measured
    assert not caplog.text


def test_a_directory_that_cannot_be_written_costs_only_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    layers = model()
    report, _ = run(layers, blocked / "kernels", lambda problem, rows, tile: 1.0)
    assert report.measured
    assert table(layers, "gated")[1] is not None
    assert "measures again" in caplog.text


def test_the_default_directory(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_directory() == Path("/somewhere/engine/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == Path.home() / ".cache" / "engine" / "kernels"


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    from engine.core.layers.tuning import tune

    layers = LayerFactory(dtype="bfloat16", device="cuda", fused=True)
    linear = layers.linear([("gate", 3072), ("up", 3072)], 1024, gated=True)
    head = layers.lm_head("lm_head", 32000, 1024)
    for layer in layers.layers:
        names = layer.tensors().items()
        layer.fill({name: torch.randn(spec.shape).to("cuda", torch.bfloat16) / 32 for name, spec in names})
    with torch.inference_mode():
        report = tune(layers, str(tmp_path))
        assert report.measured == 3 * len(BUCKETS)
        assert all(0 < choice.seconds < 1e-3 for choice in report.choices)
        assert tune(layers, str(tmp_path)).measured == 0
        for rows in (1, 3, 16, 17):
            x = torch.randn(rows, 1024, device="cuda").bfloat16()
            exact = x.double() @ linear.weights["weight"].double().T
            gate, up = exact.chunk(2, -1)
            exact = torch.nn.functional.silu(gate) * up
            assert float((linear.gated(x).double() - exact).norm() / exact.norm()) < 2**-7
            logits = x.double() @ head.weight.double().T
            chosen = logits.gather(-1, head.greedy(x)[1][:, None])[:, 0]
            torch.testing.assert_close(chosen, logits.amax(-1), rtol=2**-7, atol=2**-7)
