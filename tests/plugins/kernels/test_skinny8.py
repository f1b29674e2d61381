"""Few rows times eight-bit weights against float64: both forms, all scales, ragged sizes, shared columns."""

import pytest
import torch
from attrs import evolve

from engine.plugins.kernels.skinny8_launch import (
    COLUMNS,
    MATRIX_TILES,
    MOST_PROGRAMS,
    MOST_SPLITS,
    MOST_SUMS,
    MOST_VECTOR_TILE,
    Launch,
    Problem,
    Tile,
    Workspace,
    default_tile,
    with_ahead,
)

from .eight_bit import Operands, check_close

VECTOR = Tile(form="vector", rows=8, block_k=128, warps=4)
MATRIX = Tile(form="matrix", rows=16, block_k=128, warps=4, stages=3, columns=16)
SHARED = Tile(form="matrix", rows=32, block_k=128, warps=4, stages=3, columns=16, splits=4)
LIMIT = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 1e-5}


@pytest.fixture
def workspace(device):
    made = Workspace(device)
    made.partials.fill_(float("nan"))
    return made


def check(tile, operands, workspace, *, gated=False, codes=False, scale_rows=0, dtype=None):
    rows, inputs = operands.x.shape
    problem = Problem(weight_rows=operands.weight.shape[0], inputs=inputs, scale_rows=scale_rows, gated=gated)
    launch = Launch(problem, tile, rows, workspace, codes=codes)
    dtype = dtype or operands.x.dtype
    x, x_scale = (operands.x_codes, operands.x_scale) if codes else (operands.x, None)

    def run():
        return launch(x, operands.weight, operands.scale, operands.bias, dtype, x_scale)

    got = run()
    assert got.dtype == dtype
    check_close(got, operands.exact(codes=codes, gated=gated), LIMIT[dtype])
    assert torch.equal(got, run())
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_vector(kind, gated, rows, workspace, device, half):
    operands = Operands(kind, rows, 2 * 13, 300, device, biased=rows != 2, half=half)
    check(VECTOR, operands, workspace, gated=gated)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("scale_rows", [8, 64])
def test_vector_with_scales_of_blocks(gated, rows, scale_rows, workspace, device, half):
    operands = Operands("fp8", rows, 2 * 128, 300, device, scale_rows=scale_rows, half=half)
    check(evolve(VECTOR, block_k=256), operands, workspace, gated=gated, scale_rows=scale_rows)


def test_vector_in_float32(workspace, device):
    check(VECTOR, Operands("fp8", 3, 20, 200, device, half=torch.float32), workspace)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", [MATRIX, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize(("rows", "weight_rows", "inputs"), [(5, 26, 300), (16, 64, 1024)])
def test_matrix(kind, codes, gated, tile, rows, weight_rows, inputs, workspace, device, half):
    """Among them: a share that is empty (300 columns are 3 blocks of 128)."""
    operands = Operands(kind, rows, weight_rows, inputs, device, biased=rows == 5, half=half)
    check(tile, operands, workspace, gated=gated, codes=codes)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", [MATRIX, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("scale_rows", [4, 64])
def test_matrix_with_scales_of_blocks(codes, gated, tile, scale_rows, workspace, device, half):
    operands = Operands("fp8", 7, 2 * 64, 300, device, scale_rows=scale_rows, half=half)
    check(tile, operands, workspace, gated=gated, codes=codes, scale_rows=scale_rows)


@pytest.mark.parametrize("tile", [MATRIX, SHARED], ids=["alone", "shared"])
def test_more_rows_than_a_program_has(tile, workspace, device, half):
    check(tile, Operands("int8", 37, 50, 260, device, biased=True, half=half), workspace, codes=True)


def test_float32_results_of_codes_are_exact_sums(workspace, device):
    operands = Operands("int8", 4, 32, 512, device)
    check(SHARED, operands, workspace, codes=True, dtype=torch.float32)


def test_a_nan_in_x_shows_in_its_row_only(workspace, device, half):
    operands = Operands("fp8", 3, 20, 200, device, half=half)
    operands.x[1, 7] = float("nan")
    for tile in (VECTOR, MATRIX):
        launch = Launch(Problem(weight_rows=20, inputs=200), tile, 3, workspace)
        got = launch(operands.x, operands.weight, operands.scale, None, half)
        assert got.isnan().all(1).tolist() == [False, True, False]
        assert got.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scale_rows", [0, 4, 64, 128])
@pytest.mark.parametrize(("weight_rows", "inputs"), [(6144, 4096), (57344, 8192), (512, 14336), (96, 72)])
def test_default_tiles_keep_to_what_kernels_ask_for(codes, gated, scale_rows, weight_rows, inputs):
    problem = Problem(weight_rows=weight_rows, inputs=inputs, scale_rows=scale_rows, gated=gated)
    for rows in (1, 2, 3, 8, 16, 33, 64, 200, 256):
        tile = default_tile(problem, rows, torch.device("cpu"), codes=codes)
        assert tile.rows & (tile.rows - 1) == 0
        assert tile.block_k >= 128
        assert tile.ahead == 0 if inputs % 16 else tile.ahead <= inputs
        if tile.form == "vector":
            assert rows <= 4
            assert not codes
            assert scale_rows % tile.rows == 0
            assert tile.rows <= MOST_VECTOR_TILE
        else:
            assert tile.columns in COLUMNS
            assert tile.columns >= min(rows, COLUMNS[-1])
            assert not scale_rows or tile.block_k == 128
            programs = tile.programs(problem) * -(-rows // tile.columns)
            assert tile.splits <= MOST_SPLITS
            if tile.splits > 1:
                assert programs <= MOST_PROGRAMS
                assert programs * tile.splits * tile.rows * tile.columns <= MOST_SUMS


REAL = [(6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize(("weight_rows", "inputs", "gated"), REAL)
def test_default_tiles_at_real_sizes(kind, blocked, weight_rows, inputs, gated, workspace, device, half):
    scale_rows = 128 if blocked and kind == "fp8" else 0
    for rows in (1, 2, 3, 4, 8, 16, 17, 32, 64, 100, 256):
        operands = Operands(kind, rows, weight_rows, inputs, device, scale_rows=scale_rows, half=half)
        problem = Problem(weight_rows=weight_rows, inputs=inputs, scale_rows=scale_rows, gated=gated)
        for codes in (False, True):
            tile = default_tile(problem, rows, device, codes=codes)
            check(tile, operands, workspace, gated=gated, codes=codes, scale_rows=scale_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_every_tile_on_a_gpu(kind, columns, workspace, device, half):
    tile = MATRIX_TILES[columns]
    operands = Operands(kind, columns - 3, 1000, 2000, device, biased=True, half=half)
    problem = Problem(weight_rows=1000, inputs=2000)
    for codes in (False, True):
        for splits in (1, 4):
            check(with_ahead(evolve(tile, splits=splits), problem), operands, workspace, codes=codes)


@pytest.mark.gpu
def test_replayed_from_a_graph_behind_other_kernels(workspace, device, half):
    """With programmatic dependent launch a kernel starts before x is written."""
    operands = Operands("fp8", 8, 4096, 4096, device, half=half)
    problem = Problem(weight_rows=4096, inputs=4096)
    launch = Launch(problem, default_tile(problem, 8, device, codes=False), 8, workspace)

    def chain(x):
        for _ in range(4):
            x = launch(x, operands.weight, operands.scale, None, half)
            x = x / x.float().norm(dim=1, keepdim=True).to(half) * 8
        return x

    expected = chain(operands.x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(operands.x)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, expected)
