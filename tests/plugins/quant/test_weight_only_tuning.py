"""The tiles that are measured: few, fitting, each right; and what was chosen is what multiplies."""

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from engine.core.autotune.op import Operands
from engine.core.autotune.task import CandidateError, TuningTask
from engine.core.autotune.timer import GraphTimer
from engine.ops.gemm.packed_layout import CodeLayout, Layout, PackedMatrix
from engine.ops.gemm.skinny_launch import MOST_PROGRAMS, MOST_SUMS
from engine.ops.gemm.weight_only_launch import Multiplier
from engine.ops.gemm.weight_only_tiles import (
    MEASURED_CLASSES,
    MOST_ROWS,
    GemmShape,
    Tile,
    candidates,
    choose,
    other_splits,
)
from engine.plugins.quant import weight_only_tuning
from engine.plugins.quant.weight_only_tuning import WeightOnly
from tests.ops.gemm.w8a8 import Operands as CodeOperands, check_close

HOPPER, ADA = 227 * 2**10, 99 * 2**10
"""Bytes of shared memory."""
SMS = 132
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LAYOUTS = [
    Layout.choose(4, 128),
    Layout.choose(8, 32),
    CodeLayout(dtype="int8"),
    CodeLayout(dtype="float8_e4m3fn"),
    CodeLayout(dtype="float8_e4m3fn", scale_rows=128),
]
MOST_CANDIDATES = 16


def every(problem, rows, shared=HOPPER):
    """The first candidates, and those that refine any of them."""
    first = candidates(problem, rows, SMS, shared)
    return first, [more for tile in first if tile is not None for more in other_splits(tile, problem, rows)]


@pytest.mark.parametrize("shared", [HOPPER, ADA])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [*LLAMA, (64, 100), (128256, 4096)])
def test_candidates_are_few_and_fit(outputs, inputs, layout, shared):
    problem = GemmShape(gated=False, weight_rows=outputs, inputs=inputs, layout=layout)
    for rows in MEASURED_CLASSES:
        first, finer = every(problem, rows, shared)
        assert first[0] == choose(problem, rows, SMS, shared)
        assert len(set(first)) == len(first) <= MOST_CANDIDATES
        assert None not in first
        for tile in (*first, *finer):
            if tile is None:
                continue
            assert tile.columns >= min(rows, 128, first[0].columns)
            assert tile.shared_memory(layout) <= shared
            programs = tile.programs(problem, rows)
            if tile.splits > 1:
                assert tile.splits * 2 <= problem.blocks
                assert programs <= MOST_PROGRAMS
                assert programs * tile.splits * tile.rows * tile.columns <= MOST_SUMS


def test_where_no_tile_fits_there_is_the_library_alone():
    assert candidates(GemmShape(gated=False, weight_rows=64, inputs=512, layout=LAYOUTS[0]), 16, SMS, 2**12) == [None]


def test_names_tell_candidates_apart():
    for layout in LAYOUTS:
        problem = GemmShape(gated=True, weight_rows=4096, inputs=4096, layout=layout)
        op = WeightOnly(Multiplier(torch.device("cpu")), problem)
        for rows in MEASURED_CLASSES:
            first, finer = every(problem, rows)
            tiles = set(first) | set(finer)
            assert len({op.name(tile) for tile in tiles}) == len(tiles)


def test_numbers_of_splits_around_the_fastest_tile():
    problem = GemmShape(gated=False, weight_rows=4096, inputs=4096, layout=CodeLayout(dtype="float8_e4m3fn"))
    tile = Tile(rows=64, columns=16, warps=4, stages=6, splits=4, step=128)
    assert tile in candidates(problem, 16, SMS, HOPPER)
    assert [one.splits for one in other_splits(tile, problem, 16)] == [2, 8, 16]
    assert [one.splits for one in other_splits(evolve(tile, splits=1), problem, 16)] == [2, 4]
    assert [one.splits for one in other_splits(evolve(tile, splits=2), evolve(problem, inputs=256), 16)] == [1]


def test_key_names_all_that_the_time_depends_on():
    problem = GemmShape(gated=False, weight_rows=4096, inputs=4096, layout=LAYOUTS[0])
    others = [
        evolve(problem, gated=True),
        evolve(problem, weight_rows=64),
        evolve(problem, inputs=64),
        evolve(problem, dtype=torch.float16),
        evolve(problem, zeros=True),
        *(evolve(problem, layout=layout) for layout in LAYOUTS[1:]),
    ]
    multiplier = Multiplier(torch.device("cpu"))
    keys = [WeightOnly(multiplier, one).key for one in (problem, *others)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == "weight-only 4096x4096 4 bits, groups of 128, bfloat16"
    assert keys[-3] == "weight-only 4096x4096 int8, a scale an output, bfloat16"


@pytest.fixture
def multiplier(device, monkeypatch):
    monkeypatch.setattr(weight_only_tuning, "num_sms", lambda device: SMS)
    monkeypatch.setattr(weight_only_tuning, "shared_memory", lambda device: HOPPER)
    made = Multiplier(device)
    made.workspace.partials.fill_(float("nan"))
    return made


def grouped(rows, weight_rows, inputs, device, dtype):
    """4 bits with zero points: x, operands, layout, and what comes out in float64."""
    layout = Layout.choose(4, 64)
    values = torch.randint(0, 16, (weight_rows, inputs), dtype=torch.uint8, device=device)
    scales = ((torch.rand(inputs // 64, weight_rows, device=device) + 0.5) / 16).half()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=device)
    words, entries = layout.pack(values, scales, zeros, 64, dtype)
    x = (torch.randn(rows, inputs, device=device) / inputs**0.5).to(dtype)
    centred = values.double() - zeros.double().repeat_interleave(64, 0).T
    exact = F.linear(x.double(), centred * scales.double().repeat_interleave(64, 0).T)
    return x, Operands(weights={"words": words, "scales": entries}), layout, exact


def coded(kind, rows, weight_rows, inputs, device, dtype, scale_rows):
    """The same of eight-bit codes, with a bias."""
    made = CodeOperands(kind, rows, weight_rows, inputs, device, scale_rows=scale_rows, biased=True, half=dtype)
    layout = CodeLayout(dtype=str(made.weight.dtype).removeprefix("torch."), scale_rows=scale_rows)
    weights = {"words": layout.words(layout.pack(made.weight)), "scales": made.scale}
    return made.x, Operands(weights=weights, bias=made.bias), layout, made.exact(codes=False)


@pytest.mark.parametrize("rows", [8, 16, 64, 256])
@pytest.mark.parametrize("kind", ["4 bits", "fp8", "fp8 blocks", "int8"])
@pytest.mark.parametrize("gated", [False, True])
def test_every_candidate_multiplies_right(multiplier, device, half, kind, rows, gated):
    if kind == "4 bits":
        x, operands, layout, exact = grouped(rows, 96, 1024, device, half)
    else:
        scale_rows = 128 if "blocks" in kind else 0
        x, operands, layout, exact = coded(kind.split()[0], rows, 96, 1024, device, half, scale_rows)
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    zeros = kind == "4 bits"
    problem = GemmShape(gated=gated, weight_rows=96, inputs=1024, layout=layout, dtype=half, zeros=zeros)
    op = WeightOnly(multiplier, problem)
    first = op.candidates(rows)
    finer = op.refine(rows, [tile for tile in first if tile is None] + [first[0]])
    assert any(tile.splits > 1 for tile in (*first, *finer) if tile is not None)
    for tile in (*first, *finer):
        check_close(op.run(tile, x, operands), exact, 2**-9 if half == torch.float16 else 2**-6)


def test_what_is_chosen_multiplies_its_class_of_rows(multiplier, device, half, monkeypatch):
    x, operands, layout, exact = grouped(40, 96, 512, device, half)
    problem = GemmShape(gated=False, weight_rows=96, inputs=512, layout=layout, dtype=half, zeros=True)
    taken = []
    by_tiles, by_library = multiplier.by_tiles, multiplier.by_library
    monkeypatch.setattr(multiplier, "by_tiles", lambda *given: taken.append(given[-1]) or by_tiles(*given))
    monkeypatch.setattr(multiplier, "by_library", lambda *given: taken.append(None) or by_library(*given))

    matrix = PackedMatrix(**operands.weights, layout=layout)

    def multiply(rows):
        taken.clear()
        y = multiplier(x[:rows], matrix)
        check_close(y, exact[:rows], 2**-9 if half == torch.float16 else 2**-6)
        return taken[0]

    usual = {rows: multiply(rows) for rows in (1, 8, 9, 16, 17, 40)}
    mine = Tile(rows=32, columns=16, warps=2, stages=2, splits=2)
    op = WeightOnly(multiplier, problem)
    op.choose(16, mine)
    assert {rows: multiply(rows) for rows in usual} == {**usual, 9: mine, 16: mine}
    op.choose(64, None)
    assert {rows: multiply(rows) for rows in usual} == {**usual, 9: mine, 16: mine, 40: None}
    other = WeightOnly(multiplier, evolve(problem, gated=True))
    other.choose(8, mine)
    assert multiply(8) == usual[8]


def test_what_is_not_measured_is_as_it_was():
    multiplier = Multiplier(torch.device("cpu"))
    problem = GemmShape(gated=False, weight_rows=96, inputs=512, layout=LAYOUTS[0])
    op = WeightOnly(multiplier, problem)
    assert tuple(op.row_classes) == MEASURED_CLASSES
    assert tuple(WeightOnly(multiplier, problem, 32).row_classes) == (16, 32)
    usual = {rows: multiplier.tile(problem, rows) for rows in (8, MOST_ROWS + 1)}
    mine = Tile(rows=32, columns=8, warps=2, stages=2)
    for rows in MEASURED_CLASSES:
        op.choose(rows, mine)
    assert {rows: multiplier.tile(problem, rows) for rows in usual} == usual
    assert [multiplier.tile(problem, rows) for rows in (9, 64)] == [mine, mine]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_candidate_compiles_and_runs(device, layout):
    multiplier = Multiplier(device)
    for outputs, inputs in ((4096, 4096), (1000, 4096 + 64)):
        problem = GemmShape(gated=False, weight_rows=outputs, inputs=inputs, layout=layout)
        blocks = problem.blocks
        words = torch.randint(-(2**15), 2**15, (blocks, outputs, layout.span), device=device).to(torch.int16)
        if layout.scaled == "groups":
            scales = torch.ones(blocks, layout.groups // 2, outputs, 2, dtype=torch.float16, device=device)
        else:
            shape = (-(-outputs // layout.scale_rows), blocks) if layout.scale_rows else (outputs,)
            scales = torch.ones(shape, device=device)
            words = words & 0x3F3F  # no NaN
        matrix = PackedMatrix(words=words, scales=scales, layout=layout)
        operands = Operands(weights=matrix.tensors)
        op = WeightOnly(multiplier, problem)
        for rows in op.row_classes:
            x = torch.randn(rows, inputs, device=device).bfloat16()
            exact = multiplier.by_library(x, matrix, None, False).double()
            first = op.candidates(rows)
            tiles = [*first, *op.refine(rows, first)]
            task = TuningTask(rows=rows)
            task.add(op, operands)
            GraphTimer(device).prepare([(task, tiles)])
            for tile in tiles:
                check_close(op.run(tile, x, operands), exact, 2**-6)


@pytest.mark.gpu
def test_a_tile_that_is_too_large_cannot_run(device):
    layout = CodeLayout(dtype="int8")
    problem = GemmShape(gated=False, weight_rows=1024, inputs=4096, layout=layout)
    codes = torch.zeros(1024, 4096, dtype=torch.int8, device=device)
    task = TuningTask(rows=8)
    operands = Operands(weights={"words": layout.words(codes), "scales": torch.ones(1024, device=device)})
    task.add(WeightOnly(Multiplier(device), problem), operands)
    large, good = Tile(rows=256, columns=8, warps=8, stages=32), candidates(problem, 8, SMS, ADA)[0]
    timer = GraphTimer(device)
    timer.prepare([(task, [large, good])])
    with pytest.raises(CandidateError, match="shared memory"):
        timer.seconds(task, large)
    assert 0 < timer.seconds(task, good) < 1e-2
