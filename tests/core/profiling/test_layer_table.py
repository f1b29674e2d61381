"""The table by layer: lines of modules alike, depth, floors, and the rank that computes longest."""

from __future__ import annotations

import pytest

from engine.core.profiling import LayerRow, Peaks, RankLayers, make_layer_table

PEAKS = Peaks(bandwidth=1e6, flops=1e9)


def row(name: str, device: float, *, collective: float = 0.0, flops: float = 0.0, size: float = 0.0) -> LayerRow:
    return LayerRow(
        name=name,
        kind="" if name.startswith("(") else "linear",
        calls=1,
        kernels=2,
        cpu_us=3,
        device_us=device,
        collective_us=collective,
        flops=flops,
        flops8=0,
        bytes=size,
    )


def rank(rows: list[LayerRow], number: int = 0, step: float = 1000.0) -> RankLayers:
    return RankLayers(
        rank=number,
        device="cuda",
        steps=4,
        step_us=step,
        idle_us=step - sum(one.device_us for one in rows),
        decodes=(8,),
        prefill_tokens=(0,),
        graphs=(),
        flops=sum(one.flops for one in rows),
        flops8=0.0,
        bytes=sum(one.bytes for one in rows),
        uncounted=(),
        num_rows=len(rows),
        rows=rows,
    )


def layers(count: int) -> list[LayerRow]:
    return [
        row("model.embed", 1, size=10),
        *(row(f"model.layers.{number}.mlp.down", 20, flops=30_000, size=10) for number in range(count)),
        row("(batch)", 5),
        row("lm_head", 9, flops=1, size=10),
    ]


def test_lines_are_modules_or_kinds_by_the_number_of_layers() -> None:
    few, many = (make_layer_table([rank(layers(count))]) for count in (8, 9))
    assert [line.name for line in few.lines[:3]] == [
        "model.embed",
        "model.layers.0.mlp.down",
        "model.layers.1.mlp.down",
    ]
    assert [line.name for line in many.lines] == [
        "model.embed",
        "model.layers.*.mlp.down",
        "lm_head",
        "(batch)",
        "(idle)",
    ]
    merged = many.lines[1]
    assert (merged.modules, merged.calls, merged.kernels, merged.cpu_us, merged.device_us) == (9, 9, 18, 27, 180)
    assert (merged.bytes, merged.flops, merged.intensity) == (90, 270_000, 3000)
    assert make_layer_table([rank(layers(9))], by="module").lines[9].name == "model.layers.8.mlp.down"
    assert make_layer_table([rank(layers(2))], by="kind").lines[1].name == "model.layers.*.mlp.down"


def test_device_times_sum_to_the_step_however_lines_are_made() -> None:
    for depth in (None, 1, 2, 3, 9):
        table = make_layer_table([rank(layers(3))], depth=depth)
        assert table.sum_us == pytest.approx(table.step_us)
        assert sum(line.share for line in table.lines) == pytest.approx(1)
    names = [line.name for line in make_layer_table([rank(layers(3))], depth=3).lines]
    assert names[:4] == ["model.embed", "model.layers.0", "model.layers.1", "model.layers.2"]


def test_floors_are_those_of_each_module_and_of_the_whole_step() -> None:
    table = make_layer_table([rank(layers(9))], PEAKS)
    by_name = {line.name: line for line in table.lines}
    assert by_name["model.layers.*.mlp.down"].floor_us == pytest.approx(9 * 30)  # 30,000 FLOPs at 1 GFLOP/s
    assert by_name["model.layers.*.mlp.down"].reached == pytest.approx(1.5)
    assert by_name["lm_head"].floor_us == pytest.approx(10)  # 10 bytes at 1 MB/s
    assert by_name["(batch)"].floor_us is None
    assert table.floor_us == pytest.approx(max(270_001 / 1e9, 110 / 1e6) * 1e6)
    assert all(line.floor_us is None for line in make_layer_table([rank(layers(9))]).lines)


def test_a_slowed_rank_is_shown_and_found() -> None:
    rows = [
        [row("layers.0.linear", 100), row("layers.0.norm", 320, collective=300), row("head", 50)],
        [row("layers.0.linear", 260), row("layers.0.norm", 140, collective=120), row("head", 60)],
        [row("layers.0.linear", 105), row("layers.0.norm", 318, collective=298), row("head", 50)],
    ]
    table = make_layer_table([rank(one, number) for number, one in enumerate(rows)])
    assert table.rank == 1
    by_name = {line.name: line for line in table.lines}
    assert (by_name["layers.0.linear"].spread_us, by_name["layers.0.linear"].slowest) == (160, 1)
    assert (by_name["layers.0.norm"].spread_us, by_name["layers.0.norm"].slowest) == (180, 0)
    assert by_name["(idle)"].spread_us == pytest.approx(13)
    assert [one.compute_us for one in table.ranks] == [170, 340, 175]
    assert table.slowest == (
        "rank 1 computes longest: 340.0 us per step, 100.0% more than rank 0, which spends 300.0 us in collectives and"
        " rank 1 120.0 us"
    )
    assert make_layer_table([rank(rows[0])]).slowest == ""
    even = make_layer_table([rank(rows[0]), rank(rows[2], 2)])
    assert even.slowest == "all ranks compute for about the same time: 2.9% between the longest and the shortest"
