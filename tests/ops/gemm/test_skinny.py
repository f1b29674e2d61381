"""The skinny GEMM, of up to 128 rows, against float64: both forms, all epilogues, ragged sizes, split-K."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from engine.core.layers import gated_activation
from engine.core.layers.skinny_linear import ROW_CLASSES
from engine.ops.common.polling import EMPTY
from engine.ops.gemm.skinny_forms import columns_for
from engine.ops.gemm.skinny_launch import (
    AHEAD,
    HEAD_MAX_ROWS,
    MAX_PARTIAL_SUMS,
    SKINNY_MAX_ROWS,
    GemmShape,
    SkinnyLaunch,
    SkinnyTile,
    Workspace,
    candidates,
    default_tile,
    with_ahead,
)

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
VECTOR = SkinnyTile(form="vector", rows=8, block_k=64, warps=4)
MATRIX = SkinnyTile(form="matrix", rows=16, block_k=32, warps=4, stages=3)
SHARED = SkinnyTile(form="matrix", rows=32, block_k=16, warps=4, stages=3, splits=4)


@pytest.fixture
def workspace(device: torch.device) -> Any:
    made = Workspace(torch.device(device))
    made.partials.fill_(float("nan"))
    return made


def padded(rows: Any, columns: Any, dtype: Any, device: Any) -> Any:
    """A matrix with NaN before and behind it."""
    memory = torch.full((rows + 2, columns), float("nan"), device=device).to(dtype)
    memory[1:-1] = torch.randn(rows, columns, device=device) / columns**0.25
    return memory[1:-1]


class Operands:
    """Random operands of one GEMM shape, and the exact result in float64."""

    def __init__(
        self,
        epilogue: Any,
        rows: Any,
        outputs: Any,
        inputs: Any,
        device: Any,
        dtype: torch.dtype = torch.float32,
        biased: bool = False,
    ) -> None:
        self.gemm_shape = GemmShape(epilogue=epilogue, outputs=outputs, inputs=inputs, dtype=NAMES[dtype])
        self.x = padded(rows, inputs, dtype, device)
        self.weight = padded(self.gemm_shape.weight_rows, inputs, dtype, device)
        self.bias = padded(1, self.gemm_shape.weight_rows, dtype, device)[0] if biased else None
        bias = None if self.bias is None else self.bias.double()
        self.exact = F.linear(self.x.double(), self.weight.double(), bias)
        if epilogue == "gated":
            gate, up = self.exact.chunk(2, -1)
            self.exact = F.silu(gate) * up


def compare(tile: Any, operands: Any, workspace: Any, rows: Any) -> None:
    """Run a tile on the first rows."""
    x, exact = operands.x[:rows], operands.exact[:rows]
    launch = SkinnyLaunch(operands.gemm_shape, tile, rows, workspace)
    if operands.gemm_shape.epilogue == "argmax":
        peaks, tokens = launch.peaks(x, operands.weight)
        assert (peaks.dtype, tokens.dtype, peaks.shape, tokens.shape) == (torch.float32, torch.int64, (rows,), (rows,))
        best = exact.amax(-1)
        # Logits are compared after they are rounded. Sums of float32 in another order: the error grows with the root of
        # their length.
        rounding = torch.finfo(x.dtype).eps / 2
        torch.testing.assert_close(peaks.double(), best, rtol=1e-5 + rounding, atol=1e-6 * x.shape[1] ** 0.5)
        chosen = exact.gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(chosen, best, rtol=1e-5 + 2 * rounding, atol=1e-6 * x.shape[1] ** 0.5)
        return
    out = launch(x, operands.weight, operands.bias)
    assert out.dtype == x.dtype
    assert out.shape == exact.shape
    limit = TOLERANCE[x.dtype]
    assert float((out.double() - exact).norm() / exact.norm()) < limit
    torch.testing.assert_close(out.double(), exact, rtol=4 * limit, atol=2 * limit)
    assert torch.equal(out, launch(x, operands.weight, operands.bias))
    assert not workspace.arrivals.any()
    assert bool((workspace.polled_sums == EMPTY.value).all())


def check(
    tile: Any,
    epilogue: Any,
    rows: Any,
    outputs: Any,
    inputs: Any,
    workspace: Any,
    *,
    dtype: torch.dtype = torch.float32,
    biased: bool = False,
) -> None:
    compare(tile, Operands(epilogue, rows, outputs, inputs, workspace.device, dtype, biased), workspace, rows)


@pytest.mark.parametrize("epilogue", ["plain", "gated", "argmax"])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "inputs"), [(13, 50), (3, 200)])
def test_vector_tile_equals_float64(epilogue: str, rows: int, outputs: int, inputs: int, workspace: Any) -> None:
    check(VECTOR, epilogue, rows, outputs, inputs, workspace)


@pytest.mark.parametrize("epilogue", ["plain", "gated", "argmax"])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 65])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (13, 50)])
def test_matrix_tile_equals_float64(epilogue: str, rows: int, outputs: int, inputs: int, workspace: Any) -> None:
    check(MATRIX, epilogue, rows, outputs, inputs, workspace)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "swiglu_oai"])
@pytest.mark.parametrize(("tile", "rows"), [(VECTOR, 2), (MATRIX, 5)], ids=["vector", "matrix"])
def test_gated_by_other_activations(tile: Any, rows: int, activation: Any, workspace: Any) -> None:
    operands = Operands("gated", rows, 16, 64, workspace.device, torch.float32, True)
    gemm_shape = evolve(operands.gemm_shape, activation=activation)
    out = SkinnyLaunch(gemm_shape, tile, rows, workspace)(operands.x, operands.weight, operands.bias)
    exact = F.linear(operands.x.double(), operands.weight.double(), operands.bias.double())
    torch.testing.assert_close(out.double(), gated_activation(activation)(exact), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epilogue", ["plain", "gated"])
@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 50), (16, 33, 72), (17, 33, 72), (40, 33, 72)])
def test_split_k_equals_float64_when_a_split_is_empty(
    epilogue: str, splits: int, rows: int, outputs: int, inputs: int, workspace: Any
) -> None:
    """Of 4 splits: 50 inputs are 4 blocks of 16, one per split; 72 are 5, so that one split is empty."""
    check(evolve(SHARED, splits=splits), epilogue, rows, outputs, inputs, workspace)


@pytest.mark.parametrize("tile", [VECTOR, MATRIX, SHARED], ids=["vector", "matrix", "shared"])
@pytest.mark.parametrize("epilogue", ["plain", "gated"])
def test_each_tile_adds_a_bias(tile: Any, epilogue: str, workspace: Any) -> None:
    check(tile, epilogue, 3, 20, 48, workspace, biased=True)


@pytest.mark.parametrize(
    ("tile", "dtype"),
    [
        (VECTOR, torch.bfloat16),
        (VECTOR, torch.float16),
        (MATRIX, torch.float16),
        (SHARED, torch.float16),
        # The interpreter multiplies the bits of bfloat16 as integers.
        pytest.param(MATRIX, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(SHARED, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_each_tile_multiplies_in_16_bits(tile: Any, dtype: torch.dtype, workspace: Any) -> None:
    check(tile, "plain", 4, 24, 96, workspace, dtype=dtype)


def check_ties(tile: Any, rows: int, outputs: int, inputs: int, workspace: Any, dtype: torch.dtype) -> None:
    """Compare `peaks` with the same tile's outputs, most of whose largest are equal once rounded."""
    weight = (1 + torch.randn(outputs, inputs, device=workspace.device) * 0.002).to(dtype)
    x = (1 + torch.randn(rows, inputs, device=workspace.device).abs()).to(dtype)
    plain, argmax = (
        SkinnyLaunch(
            GemmShape(epilogue=epilogue, outputs=outputs, inputs=inputs, dtype=str(dtype)[6:]), tile, rows, workspace
        )
        for epilogue in ("plain", "argmax")
    )
    out = plain(x, weight)
    assert ((out == out.amax(-1, keepdim=True)).sum(-1) > 1).any(), "there are no ties"
    peaks, tokens = argmax.peaks(x, weight)
    assert torch.equal(peaks, out.amax(-1).float())
    assert tokens.tolist() == [int((row == row.max()).nonzero()[0]) for row in out]


@pytest.mark.parametrize(
    ("tile", "rows", "dtype"),
    [
        (VECTOR, 3, torch.bfloat16),
        (VECTOR, 1, torch.float16),
        (MATRIX, 5, torch.float16),
        pytest.param(MATRIX, 16, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_peaks_are_the_first_of_the_largest_rounded_outputs(
    tile: Any, rows: int, dtype: torch.dtype, workspace: Any
) -> None:
    check_ties(tile, rows, 300, 64, workspace, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(151936, 1024), (128256, 4096)])
def test_peaks_of_all_tiles_are_the_first_of_the_largest_outputs(outputs: int, inputs: int, workspace: Any) -> None:
    shape = GemmShape(epilogue="argmax", outputs=outputs, inputs=inputs, dtype="bfloat16")
    for rows in (1, 2, 4, 8, HEAD_MAX_ROWS):
        for tile in candidates(shape, rows, workspace.device):
            check_ties(tile, rows, outputs, inputs, workspace, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy: infinity times a padding zero
@pytest.mark.parametrize("tile", [VECTOR, MATRIX], ids=["vector", "matrix"])
def test_max_logits_show_values_that_are_not_finite(tile: Any, workspace: Any) -> None:
    device = workspace.device
    weight = torch.randn(50, 32, device=device).abs()
    weight[40] = weight[7] = 100.0
    x = torch.ones(4, 32, device=device)
    x[1, 3], x[2, 3], x[3] = float("nan"), float("inf"), -1.0
    gemm_shape = GemmShape(epilogue="argmax", outputs=50, inputs=32, dtype="float32")
    peaks, tokens = SkinnyLaunch(gemm_shape, tile, 4, workspace).peaks(x, weight)
    assert tokens[0] == 7
    assert peaks[1].isnan()
    assert peaks[2] == float("inf")
    assert ((tokens >= 0) & (tokens < 50)).all()
    assert tokens[3] == int((x[3] @ weight.T).argmax())


def test_a_nan_in_one_weight_row_shows_only_for_its_output(workspace: Any) -> None:
    weight = torch.randn(20, 32, device=workspace.device)
    weight[5, 9] = float("nan")
    gemm_shape = GemmShape(epilogue="plain", outputs=20, inputs=32, dtype="float32")
    for tile in (VECTOR, MATRIX, SHARED):
        out = SkinnyLaunch(gemm_shape, tile, 2, workspace)(torch.randn(2, 32, device=workspace.device), weight)
        assert torch.equal(out.isnan().nonzero()[:, 1].unique(), torch.tensor([5], device=workspace.device))


SHAPES = [(6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (1024, 2048), (3072, 1024), (1024, 3072)]


@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (128256, 4096), (64, 64)])
@pytest.mark.parametrize("epilogue", ["plain", "gated", "argmax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_candidates_fit_the_workspace(
    outputs: Any, inputs: Any, epilogue: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ops.gemm.skinny_launch.num_sms", lambda device: 132)
    gemm_shape = GemmShape(epilogue=epilogue, outputs=outputs, inputs=inputs, dtype=dtype)
    cpu = torch.device("cpu")
    for rows in ROW_CLASSES:
        tiles = [*candidates(gemm_shape, rows, cpu), default_tile(gemm_shape, rows, cpu)]
        for tile in filter(None, tiles):
            assert tile.form == "matrix" or rows <= 4
            assert dtype != "float32" or tile.form == "vector"
            assert tile.splits == 1 or epilogue != "argmax"
            if tile.splits > 1:
                assert tile.programs(gemm_shape) * tile.splits * tile.rows * columns_for(rows) <= MAX_PARTIAL_SUMS
        if dtype == "bfloat16" and inputs >= 1024:
            assert len(tiles) >= 3
            assert len(set(tiles[:-1])) == len(tiles) - 1


def test_prefetching_needs_aligned_rows() -> None:
    gemm_shape = GemmShape(epilogue="plain", outputs=64, inputs=4096, dtype="bfloat16")
    assert [tile.ahead for tile in with_ahead(VECTOR, gemm_shape, 2)] == [AHEAD[0] // 8, 8192]
    assert with_ahead(VECTOR, GemmShape(epilogue="plain", outputs=64, inputs=4097, dtype="bfloat16"), 2) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("epilogue", ["plain", "gated", "argmax"])
def test_all_tiles_equal_float64_at_real_sizes(outputs: Any, inputs: Any, epilogue: str, workspace: Any) -> None:
    operands = Operands(epilogue, SKINNY_MAX_ROWS, outputs, inputs, workspace.device, torch.bfloat16)
    for rows in ROW_CLASSES:
        for tile in candidates(operands.gemm_shape, rows, workspace.device):
            for one in [tile, *with_ahead(tile, operands.gemm_shape, 2)]:
                for present in sorted({rows, max(rows - 1, 1)}):
                    compare(one, operands, workspace, present)


@pytest.mark.gpu
def test_a_weight_beyond_two_to_the_31_bytes(workspace: Any) -> None:
    check(
        SkinnyTile(form="vector", rows=4, block_k=1024, warps=4),
        "argmax",
        1,
        151936,
        16384,
        workspace,
        dtype=torch.bfloat16,
    )


def test_a_split_tile_is_also_tried_with_a_program_per_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.ops.gemm.skinny_launch.num_sms", lambda device: 132)
    gemm_shape = GemmShape(epilogue="plain", outputs=2304, inputs=9216, dtype="bfloat16")
    tiles = candidates(gemm_shape, 8, torch.device("cpu"))
    assert len(set(tiles)) == len(tiles)
    assert {tile.splits for tile in tiles if (tile.rows, tile.block_k, tile.stages) == (64, 256, 3)} == {3, 8}
    gemm_shape = GemmShape(epilogue="plain", outputs=28672, inputs=4096, dtype="bfloat16")
    assert {tile.splits for tile in candidates(gemm_shape, 8, torch.device("cpu"))} == {1}


def test_a_tile_is_tried_with_the_splits_that_load_multiprocessors_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """6784 outputs are 106 tiles of 64: with 6 splits of 9 blocks, 636 programs are at most 5 per multiprocessor."""
    monkeypatch.setattr("engine.ops.gemm.skinny_launch.num_sms", lambda device: 132)
    gemm_shape = GemmShape(epilogue="plain", outputs=6784, inputs=6912, dtype="bfloat16")
    tiles = candidates(gemm_shape, 2, torch.device("cpu"))
    assert {tile.splits for tile in tiles if (tile.rows, tile.block_k) == (64, 128)} == {1, 2, 6}
