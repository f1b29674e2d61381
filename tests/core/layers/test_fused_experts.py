"""The experts' tiles: chosen by measurement for each number of tokens, and found again on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from engine.core.autotune import Operands
from engine.core.autotune.cache import TuningCache
from engine.core.autotune.tuner import collect_tasks, tune_tasks
from engine.core.layers import FusedExperts, LayerFactory
from engine.core.layers.fused_experts import FusedPlainExperts
from engine.core.quant import ExpertsSpec
from engine.core.weights import DummySource, load_weights
from engine.ops.experts.tiles import FEW_ROWS, ROW_CLASSES, ExpertsShape, candidates, default_tile, other_down_tiles
from engine.ops.experts.weights import WeightFormat


class FakeTimer:
    """The fastest gate and up projection has 64 outputs per tile, the fastest down projection 128."""

    def __init__(self) -> None:
        self.asked = 0

    def prepare(self, wanted: Any) -> None:
        pass

    def seconds(self, task: Any, tile: Any) -> float:
        self.asked += 1
        return float(tile.rows + abs(tile.gate_up.outputs - 64) + abs(tile.down.outputs - 128) / 2)


def layers() -> LayerFactory:
    made = LayerFactory(dtype="bfloat16", device="cpu", fused=True)
    for number in range(2):
        made.experts(f"{number}.experts", 64, 32, 16, 2)
    load_weights(made, DummySource())
    return made


def test_tiles_of_both_projections_are_chosen_apart_and_kept(tmp_path: Path) -> None:
    cache, timer = TuningCache(tmp_path, {"device": "GPU"}), FakeTimer()
    tasks = collect_tasks(layers())
    classes = ROW_CLASSES[1:]  # one token has kernels without tiles
    assert [(task.rows, len(task.ops), len(task.operands)) for task in tasks] == [(rows, 2, 2) for rows in classes]
    report = tune_tasks(tasks, cache, timer)
    assert report.measured == len(classes)
    again = layers()
    assert tune_tasks(collect_tasks(again), cache, FakeTimer()).measured == 0
    for layer in again.layers:
        kernel = layer.kernel  # type: ignore[attr-defined]
        assert isinstance(kernel, FusedPlainExperts)
        assert {kernel.op.tile(rows).down.outputs for rows in (5, 700, 100000)} == {128}
        assert {kernel.op.tile(rows).gate_up.outputs for rows in (5, 700, 100000)} == {64}


def test_keys_tell_formats_and_sizes_apart() -> None:
    spec = ExpertsSpec(name="e", num_experts=8, top_k=2, hidden_size=64, intermediate_size=32, dtype="bfloat16")
    ops = [
        FusedExperts(spec, form)
        for form in (
            WeightFormat(kind="plain"),
            WeightFormat(kind="channel", dtype="int8"),
            WeightFormat(kind="channel", dtype="float8_e4m3fn"),
            WeightFormat(kind="int4", group=64),
            WeightFormat(kind="int4", group=128),
            WeightFormat(kind="fp4", group=32),
        )
    ]
    ops.append(FusedExperts(spec, WeightFormat(kind="channel", dtype="int8"), torch.int8))
    assert len({op.key for op in ops}) == len(ops)


def test_more_tokens_have_larger_tiles_by_default() -> None:
    spec = ExpertsSpec(name="e", num_experts=128, top_k=8, hidden_size=64, intermediate_size=32, dtype="bfloat16")
    shape = FusedExperts(spec, WeightFormat(kind="plain")).shape
    assert [default_tile(shape, tokens).rows for tokens in (1, 256, 512, 1024, 8192)] == [16, 16, 32, 64, 128]
    assert all(candidates(shape, tokens)[0] == default_tile(shape, tokens) for tokens in ROW_CLASSES)


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (32, 4), (8, 8)])
def test_4_bit_weights_have_tiles_of_few_rows_for_as_few_tokens(experts: int, top_k: int) -> None:
    shape = ExpertsShape(
        num_experts=experts, rank_experts=experts, top_k=top_k, hidden=64, intermediate=32,
        format=WeightFormat(kind="int4", group=128), activation="silu", dtype="bfloat16", wgmma=True,
    )  # fmt: skip
    for tokens in ROW_CLASSES:
        few = {FEW_ROWS} if tokens <= FEW_ROWS else set()
        assert (default_tile(shape, tokens).rows == FEW_ROWS) == bool(few)
        assert {tile.rows for tile in candidates(shape, tokens)} & {FEW_ROWS} == few
        assert default_tile(evolve(shape, wgmma=False), tokens).rows > FEW_ROWS
        assert default_tile(evolve(shape, format=WeightFormat(kind="plain")), tokens).rows > FEW_ROWS


@pytest.mark.parametrize(
    ("form", "change", "bits"),
    [
        (WeightFormat(kind="plain"), {}, 16),
        (WeightFormat(kind="plain"), {"dtype": "float32"}, 0),
        (WeightFormat(kind="plain"), {"wgmma": False}, 0),
        (WeightFormat(kind="plain"), {"intermediate": 36}, 0),
        (WeightFormat(kind="channel", dtype="float8_e4m3fn"), {"quantized": "float8_e4m3fn"}, 8),
        (WeightFormat(kind="channel", dtype="float8_e4m3fn"), {}, 0),
        (WeightFormat(kind="block", dtype="float8_e4m3fn"), {"quantized": "float8_e4m3fn"}, 0),
        (WeightFormat(kind="fp4", group=32), {"max_dequantized_bytes": 2**20}, 16),
        (WeightFormat(kind="int4", group=32), {"max_dequantized_bytes": 2**20}, 16),
        (WeightFormat(kind="fp4", group=32), {"max_dequantized_bytes": 2**10}, 0),
    ],
)
def test_persistent_tiles_are_the_default_for_many_rows(form: WeightFormat, change: Any, bits: int) -> None:
    shape = ExpertsShape(
        num_experts=32, rank_experts=32, top_k=4, hidden=64, intermediate=32, format=form, activation="silu",
        dtype="bfloat16", wgmma=True,
    )  # fmt: skip
    shape = evolve(shape, **change)
    assert shape.persistent_bits == bits
    of_class = {tokens: candidates(shape, tokens) for tokens in ROW_CLASSES}
    persistent = {tokens for tokens, tiles in of_class.items() if any(tile.gate_up.persistent for tile in tiles)}
    # A class of 4-bit weights has them only if its smallest number of tokens does, to which the choice extends.
    assert persistent == (set() if not bits else {8192} if form.is_4bit else {512, 2048, 4096, 8192})
    for tokens, tiles in of_class.items():
        assert tiles[0] == default_tile(shape, tokens)
        assert tiles[0].gate_up.persistent == (tokens in persistent and tokens >= 2048)
        for tile in tiles:
            others = other_down_tiles(shape, tile)
            assert {other.dequantized for other in others} <= {tile.dequantized}
            assert tile.dequantized == (form.is_4bit and tile.gate_up.persistent)
            assert all(other.gate_up == tile.gate_up and other.down != tile.down for other in others)


def test_tuning_spreads_tokens_evenly_over_different_experts() -> None:
    for num_experts, top_k in ((128, 8), (60, 4), (32, 4), (8, 8)):
        spec = ExpertsSpec(
            name="e", num_experts=num_experts, top_k=top_k, hidden_size=8, intermediate_size=8, dtype="float32"
        )
        routing = FusedExperts(spec, WeightFormat(kind="plain"))._even_routing(torch.zeros(num_experts * 2, 8))
        assert all(len(set(row)) == top_k for row in routing.experts.tolist())
        counts = torch.bincount(routing.experts.flatten().long(), minlength=num_experts)
        assert counts.min() == counts.max()


FLOAT8 = torch.float8_e4m3fn


def hopper_op(monkeypatch: pytest.MonkeyPatch, form: WeightFormat, top_k: int, quantized: Any = None) -> FusedExperts:
    """Experts as on a GPU that has the kernels for few tokens."""
    monkeypatch.setattr("engine.ops.common.launch.has_wgmma", lambda device: True)
    spec = ExpertsSpec(name="e", num_experts=32, top_k=top_k, hidden_size=256, intermediate_size=128, dtype="bfloat16")
    return FusedExperts(spec, form, quantized)


@pytest.mark.parametrize(
    ("form", "top_k", "quantized", "few", "classes"),
    [
        (WeightFormat(kind="plain"), 8, None, range(1, 9), ROW_CLASSES[2:]),
        (WeightFormat(kind="plain"), 2, None, range(4, 9), ROW_CLASSES[1:]),  # 2 and 3 tokens use tiles
        (WeightFormat(kind="channel", dtype="float8_e4m3fn"), 8, FLOAT8, range(1, 3), ROW_CLASSES[1:]),
        (WeightFormat(kind="block", dtype="float8_e4m3fn", scale_rows=128), 8, FLOAT8, range(1, 9), ROW_CLASSES[2:]),
        (WeightFormat(kind="int4", group=128), 8, None, range(1, 2), ROW_CLASSES[1:]),
        (WeightFormat(kind="channel", dtype="int8"), 8, torch.int8, range(0), ROW_CLASSES[1:]),
    ],
    ids=["plain", "plain, two experts per token", "float8", "float8 blocks", "int4", "int8"],
)
def test_few_tokens_use_their_own_kernels_and_are_neither_quantized_nor_tuned(
    form: WeightFormat, top_k: int, quantized: Any, few: range, classes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = hopper_op(monkeypatch, form, top_k, quantized)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "engine.ops.experts.experts_mlp.experts_mlp",
        lambda x, *_, **options: calls.append({"tokens": len(x), **options}),
    )
    weights = dict.fromkeys(("gate_up", "down"), torch.empty(0))
    for tokens in range(1, 18):
        x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
        op(x, op._even_routing(x), weights, None)
    assert [call["tokens"] for call in calls if call["few_tokens"] is not None] == list(few)
    unquantized = {1, *few}  # one token has kernels of its own without Hopper, too
    assert [call["tokens"] for call in calls if call["quantized"] is not None] == [
        tokens for tokens in range(1, 18) if quantized is not None and tokens not in unquantized
    ]
    assert op.row_classes == list(classes)


def test_tuning_measures_tiles_where_kernels_for_few_tokens_compute_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    op = hopper_op(monkeypatch, WeightFormat(kind="block", dtype="float8_e4m3fn", scale_rows=128), 2, FLOAT8)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("engine.ops.experts.experts_mlp.experts_mlp", lambda *_, **options: calls.append(options))
    operands = Operands(weights=dict.fromkeys(("gate_up", "down"), torch.empty(0)))
    op.run(op.candidates(8)[0], torch.zeros(8, 256, dtype=torch.bfloat16), operands)
    op.compile(8, op.candidates(8)[0], operands)
    assert 8 in op.row_classes
    for call in calls:
        assert call["few_tokens"] is None
        assert call["quantized"] == FLOAT8  # as with 2 and 3 tokens, which use the tile
