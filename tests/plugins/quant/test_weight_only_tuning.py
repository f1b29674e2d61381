"""Weight-only tiles as candidates: few, within shared memory, each correct; and the chosen tile is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from engine.core.autotune.op import Operands
from engine.core.autotune.task import CandidateError, TuningTask
from engine.core.autotune.timer import GraphTimer
from engine.ops.gemm.packed_layout import GroupedLayout, PackedMatrix, W8Layout
from engine.ops.gemm.skinny_launch import MAX_PARTIAL_SUMS, MAX_SPLIT_TILES
from engine.ops.gemm.weight_only_candidates import (
    MAX_NARROW_PROGRAMS_PER_SM,
    MEASURED_CLASSES,
    NARROW_SHAPES,
    TRIED_AHEAD,
    candidates,
    even_splits,
    other_splits,
    prefetching,
)
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import (
    WEIGHT_ONLY_MAX_ROWS,
    WeightOnlyShape,
    WeightOnlyTile,
    default_tile,
)
from engine.plugins.quant import weight_only_tuning
from engine.plugins.quant.weight_only_tuning import WeightOnlyOp
from tests.ops.gemm.w8a8 import Operands as CodeOperands, check_close

HOPPER, ADA = 227 * 2**10, 99 * 2**10
"""Bytes of shared memory."""
SMS = 132
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LAYOUTS = [
    GroupedLayout.choose(4, 128),
    GroupedLayout.choose(8, 32),
    W8Layout(dtype="int8"),
    W8Layout(dtype="float8_e4m3fn"),
    W8Layout(dtype="float8_e4m3fn", scale_rows=128),
]
MOST_CANDIDATES = 16


def every(gemm_shape: Any, rows: Any, shared: Any = HOPPER) -> Any:
    """The candidates, and the refinements of each."""
    first = candidates(gemm_shape, rows, SMS, shared)
    return first, [more for tile in first if tile is not None for more in other_splits(tile, gemm_shape, rows)]


@pytest.mark.parametrize("shared", [HOPPER, ADA])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [*LLAMA, (64, 100), (128256, 4096)])
def test_candidates_are_few_and_fit(outputs: Any, inputs: Any, layout: Any, shared: Any) -> None:
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=outputs, inputs=inputs, layout=layout)
    for rows in MEASURED_CLASSES:
        first, finer = every(gemm_shape, rows, shared)
        assert first[0] == default_tile(gemm_shape, rows, SMS, shared)
        assert len(set(first)) == len(first) <= MOST_CANDIDATES
        assert None not in first
        for tile in (*first, *finer):
            if tile is None:
                continue
            programs = tile.programs(gemm_shape, rows)
            if tile.columns < min(rows, 128, first[0].columns):
                assert (tile.rows, tile.columns, tile.warps, tile.stages) in NARROW_SHAPES
                assert programs <= MAX_NARROW_PROGRAMS_PER_SM * SMS
            assert tile.shared_memory(layout) <= shared
            if tile.splits > 1:
                assert tile.splits * 2 <= gemm_shape.blocks
                assert programs <= MAX_SPLIT_TILES
                assert programs * tile.splits * tile.rows * tile.columns <= MAX_PARTIAL_SUMS


def test_the_library_is_the_only_candidate_where_no_tile_fits() -> None:
    assert candidates(WeightOnlyShape(gated=False, weight_rows=64, inputs=512, layout=LAYOUTS[0]), 16, SMS, 2**12) == [
        None
    ]


def test_candidates_have_distinct_names() -> None:
    for layout in LAYOUTS:
        gemm_shape = WeightOnlyShape(gated=True, weight_rows=4096, inputs=4096, layout=layout)
        op = WeightOnlyOp(WeightOnlyMatmul(torch.device("cpu")), gemm_shape)
        for rows in MEASURED_CLASSES:
            first, finer = every(gemm_shape, rows)
            tiles = set(first) | set(finer)
            assert len({op.name(tile) for tile in tiles}) == len(tiles)


def test_refinement_tries_other_splits_of_the_fastest_tile() -> None:
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=4096, inputs=4096, layout=W8Layout(dtype="float8_e4m3fn"))
    tile = WeightOnlyTile(rows=64, columns=16, warps=4, stages=6, splits=4, step=128)
    assert tile in candidates(gemm_shape, 16, SMS, HOPPER)
    assert [one.splits for one in other_splits(tile, gemm_shape, 16)] == [1, 2, 8, 16]
    assert [one.splits for one in other_splits(evolve(tile, splits=1), gemm_shape, 16)] == [2, 4]
    assert [one.splits for one in other_splits(evolve(tile, splits=2), evolve(gemm_shape, inputs=256), 16)] == [1]


def test_few_tiles_of_many_rows_are_also_tried_with_fewer_columns() -> None:
    small = WeightOnlyShape(gated=False, weight_rows=1024, inputs=1024, layout=LAYOUTS[0])
    for wgmma in (False, True):
        found = candidates(small, 128, SMS, HOPPER, wgmma=wgmma)
        assert {16, 32, 64} <= {tile.columns for tile in found}
        large = candidates(evolve(small, weight_rows=28672), 128, SMS, HOPPER, wgmma=wgmma)
        assert all(tile.columns == 128 for tile in large if isinstance(tile, WeightOnlyTile) and tile.rows != 128)


def test_splits_that_are_no_powers_of_two_are_tried_for_few_rows() -> None:
    small = WeightOnlyShape(gated=False, weight_rows=2304, inputs=2304, layout=W8Layout(dtype="int8"))
    tile = WeightOnlyTile(rows=32, columns=16, warps=2, stages=4, step=128)
    assert [one.splits for one in even_splits(tile, small, 16, SMS)] == [1, 3]
    assert even_splits(tile, small, 64, SMS) == []


def test_small_weights_are_also_tried_with_prefetching() -> None:
    tile = WeightOnlyTile(rows=64, columns=16, warps=4, stages=6)
    small = WeightOnlyShape(gated=False, weight_rows=1024, inputs=1024, layout=LAYOUTS[0])
    assert prefetching(tile, small) == [evolve(tile, ahead=TRIED_AHEAD[4])]
    assert prefetching(tile, evolve(small, layout=W8Layout(dtype="int8"))) == [evolve(tile, ahead=TRIED_AHEAD[8])]
    assert not prefetching(evolve(tile, ahead=TRIED_AHEAD[4]), small)
    assert not prefetching(tile, evolve(small, weight_rows=2**15))


def test_key_names_all_that_the_time_depends_on() -> None:
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=4096, inputs=4096, layout=LAYOUTS[0])
    others = [
        evolve(gemm_shape, gated=True),
        evolve(gemm_shape, weight_rows=64),
        evolve(gemm_shape, inputs=64),
        evolve(gemm_shape, dtype=torch.float16),
        evolve(gemm_shape, zeros=True),
        *(evolve(gemm_shape, layout=layout) for layout in LAYOUTS[1:]),
    ]
    matmul = WeightOnlyMatmul(torch.device("cpu"))
    keys = [WeightOnlyOp(matmul, one).key for one in (gemm_shape, *others)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "weight-only 4096x4096 4 bits, groups of 128, bfloat16"
    assert keys[-3] == "weight-only 4096x4096 int8, a scale per output, bfloat16"


@pytest.fixture
def matmul(device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(weight_only_tuning, "num_sms", lambda device: SMS)
    monkeypatch.setattr(weight_only_tuning, "shared_memory", lambda device: HOPPER)
    made = WeightOnlyMatmul(device)
    made.workspace.partials.fill_(float("nan"))
    return made


def grouped(rows: Any, weight_rows: Any, inputs: Any, device: Any, dtype: Any) -> Any:
    """4 bits with zero points: x, operands, layout, and the exact result in float64."""
    layout = GroupedLayout.choose(4, 64)
    values = torch.randint(0, 16, (weight_rows, inputs), dtype=torch.uint8, device=device)
    scales = ((torch.rand(inputs // 64, weight_rows, device=device) + 0.5) / 16).half()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=device)
    packed, entries = layout.pack(values, scales, zeros, 64, dtype)
    x = (torch.randn(rows, inputs, device=device) / inputs**0.5).to(dtype)
    centred = values.double() - zeros.double().repeat_interleave(64, 0).T
    exact = F.linear(x.double(), centred * scales.double().repeat_interleave(64, 0).T)
    return x, Operands(weights={"packed": packed, "scales": entries}), layout, exact


def w8_matrix(kind: Any, rows: Any, weight_rows: Any, inputs: Any, device: Any, dtype: Any, scale_rows: Any) -> Any:
    """The same for W8, with a bias."""
    made = CodeOperands(kind, rows, weight_rows, inputs, device, scale_rows=scale_rows, biased=True, half=dtype)
    layout = W8Layout(dtype=str(made.weight.dtype).removeprefix("torch."), scale_rows=scale_rows)
    weights = {"packed": layout.as_words(layout.pack(made.weight)), "scales": made.scale}
    return made.x, Operands(weights=weights, bias=made.bias), layout, made.exact(codes=False)


KINDS = ("4 bits", "fp8", "fp8 blocks", "int8")
ROWS = (8, 16, 64, 256)


@pytest.mark.parametrize(  # each kind and each number of rows, gated and not
    ("kind", "rows", "gated"),
    [(kind, rows, (i + j) % 2 == 1) for i, kind in enumerate(KINDS) for j, rows in enumerate(ROWS)],
)
def test_every_candidate_is_correct(matmul: Any, device: Any, half: Any, kind: str, rows: int, gated: bool) -> None:
    if kind == "4 bits":
        x, operands, layout, exact = grouped(rows, 96, 1024, device, half)
    else:
        scale_rows = 128 if "blocks" in kind else 0
        x, operands, layout, exact = w8_matrix(kind.split(maxsplit=1)[0], rows, 96, 1024, device, half, scale_rows)
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    zeros = kind == "4 bits"
    gemm_shape = WeightOnlyShape(gated=gated, weight_rows=96, inputs=1024, layout=layout, dtype=half, zeros=zeros)
    op = WeightOnlyOp(matmul, gemm_shape)
    first = op.candidates(rows)
    split = [tile for tile in first if isinstance(tile, WeightOnlyTile)]
    finer = op.refine(rows, [tile for tile in first if tile is None] + split[:1])
    assert any(tile.splits > 1 for tile in (*split, *finer))
    for tile in (*first, *finer):
        check_close(op.run(tile, x, operands), exact, 2**-9 if half == torch.float16 else 2**-6)


def test_a_chosen_tile_serves_its_row_class(
    matmul: Any, device: Any, half: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, operands, layout, exact = grouped(40, 96, 512, device, half)
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=96, inputs=512, layout=layout, dtype=half, zeros=True)
    taken = []
    multiply_by_tile, dequantize_and_multiply = matmul.multiply_by_tile, matmul.dequantize_and_multiply
    monkeypatch.setattr(matmul, "multiply_by_tile", lambda *given: taken.append(given[4]) or multiply_by_tile(*given))
    monkeypatch.setattr(
        matmul, "dequantize_and_multiply", lambda *given: taken.append(None) or dequantize_and_multiply(*given)
    )

    matrix = PackedMatrix(**operands.weights, layout=layout)

    def multiply(rows: Any) -> Any:
        taken.clear()
        y = matmul(x[:rows], matrix)
        check_close(y, exact[:rows], 2**-9 if half == torch.float16 else 2**-6)
        return taken[0]

    usual = {rows: multiply(rows) for rows in (1, 8, 9, 16, 17, 40)}
    mine = WeightOnlyTile(rows=32, columns=16, warps=2, stages=2, splits=2)
    op = WeightOnlyOp(matmul, gemm_shape)
    op.choose(16, mine)
    assert {rows: multiply(rows) for rows in usual} == {**usual, 9: mine, 16: mine}
    op.choose(64, None)
    assert {rows: multiply(rows) for rows in usual} == {**usual, 9: mine, 16: mine, 40: None}
    other = WeightOnlyOp(matmul, evolve(gemm_shape, gated=True))
    other.choose(8, mine)
    assert multiply(8) == usual[8]


def test_rows_that_are_not_measured_keep_their_default() -> None:
    matmul = WeightOnlyMatmul(torch.device("cpu"))
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=96, inputs=512, layout=LAYOUTS[0])
    op = WeightOnlyOp(matmul, gemm_shape)
    assert tuple(op.row_classes) == MEASURED_CLASSES
    assert tuple(WeightOnlyOp(matmul, gemm_shape, 32).row_classes) == (16, 32)
    usual = {rows: matmul.tile(gemm_shape, rows) for rows in (8, WEIGHT_ONLY_MAX_ROWS + 1)}
    mine = WeightOnlyTile(rows=32, columns=8, warps=2, stages=2)
    for rows in MEASURED_CLASSES:
        op.choose(rows, mine)
    assert {rows: matmul.tile(gemm_shape, rows) for rows in usual} == usual
    assert [matmul.tile(gemm_shape, rows) for rows in (9, 64)] == [mine, mine]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_candidate_compiles_and_runs(device: Any, layout: Any) -> None:
    matmul = WeightOnlyMatmul(device)
    for outputs, inputs in ((4096, 4096), (1000, 4096 + 64)):
        gemm_shape = WeightOnlyShape(gated=False, weight_rows=outputs, inputs=inputs, layout=layout)
        blocks = gemm_shape.blocks
        packed = torch.randint(-(2**15), 2**15, (blocks, outputs, layout.span), device=device).to(torch.int16)
        if layout.scale_layout == "groups":
            scales = torch.ones(blocks, layout.groups // 2, outputs, 2, dtype=torch.float16, device=device)
        else:
            shape = (-(-outputs // layout.scale_rows), blocks) if layout.scale_rows else (outputs,)
            scales = torch.ones(shape, device=device)
            packed = packed & 0x3F3F  # no NaN
        matrix = PackedMatrix(packed=packed, scales=scales, layout=layout)
        operands = Operands(weights=matrix.tensors)
        op = WeightOnlyOp(matmul, gemm_shape)
        for rows in op.row_classes:
            x = torch.randn(rows, inputs, device=device).bfloat16()
            exact = matmul.dequantize_and_multiply(x, matrix, None, False).double()
            first = op.candidates(rows)
            tiles = [*first, *op.refine(rows, first)]
            task = TuningTask(rows=rows)
            task.add(op, operands)
            GraphTimer(device).prepare([(task, tiles)])
            for tile in tiles:
                check_close(op.run(tile, x, operands), exact, 2**-6)


@pytest.mark.gpu
def test_a_tile_that_exceeds_shared_memory_is_a_candidate_error(device: Any) -> None:
    layout = W8Layout(dtype="int8")
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=1024, inputs=4096, layout=layout)
    codes = torch.zeros(1024, 4096, dtype=torch.int8, device=device)
    task = TuningTask(rows=8)
    operands = Operands(weights={"packed": layout.as_words(codes), "scales": torch.ones(1024, device=device)})
    task.add(WeightOnlyOp(WeightOnlyMatmul(device), gemm_shape), operands)
    large, good = WeightOnlyTile(rows=256, columns=8, warps=8, stages=32), candidates(gemm_shape, 8, SMS, ADA)[0]
    timer = GraphTimer(device)
    timer.prepare([(task, [large, good])])
    with pytest.raises(CandidateError, match="shared memory"):
        timer.seconds(task, large)
    assert 0 < timer.seconds(task, good) < 1e-2
