from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from engine.ops.activation.quantize_rows import VALUE_ROW_MULTIPLE
from engine.ops.common.launch import has_tma
from engine.ops.gemm.scaled_matmul import W8A8Tile, matmul
from engine.ops.gemm.skinny_launch import Workspace
from engine.ops.gemm.tile_order import loaded_shape
from engine.plugins.quant.w8a8_tiles import LARGE_TILE, MEDIUM_TILES, SMALL_TILES, matmul_tile

from .w8a8 import Operands, before_others, check_close

TILE = W8A8Tile(rows=32, outputs=64, warps=4, stages=2)
LIMIT = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 1e-5}


@pytest.fixture
def workspace(device: torch.device) -> Any:
    return Workspace(device)


def multiply(operands: Any, tile: Any, dtype: Any, workspace: Any) -> Any:
    codes = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, operands.bias)
    return matmul(*codes, dtype, tile, workspace)


def check(operands: Any, tile: Any, dtype: Any, workspace: Any) -> None:
    got = multiply(operands, tile, dtype, workspace)
    assert got.dtype == dtype
    check_close(got, operands.exact(codes=True), LIMIT[dtype])
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("rows", "weight_rows", "inputs"), [(70, 90, 208), (32, 64, 256), (1, 16, 16)])
def test_matmul_with_a_scale_per_row(
    kind: str, rows: int, weight_rows: int, inputs: int, device: torch.device, half: torch.dtype, workspace: Any
) -> None:
    operands = Operands(kind, rows, weight_rows, inputs, device, biased=rows == 70, half=half)
    check(operands, TILE, half, workspace)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [1, 40, 64, 70])
def test_what_memory_has_after_the_rows_of_x_does_not_matter(
    kind: str, rows: int, device: torch.device, half: torch.dtype, workspace: Any
) -> None:
    operands = Operands(kind, rows, 64, 208, device, half=half)
    x = before_others(operands.x_codes, VALUE_ROW_MULTIPLE)
    for tma in (True, False) if has_tma(device) else (False,):
        got = matmul(
            x, operands.x_scale, operands.weight, operands.scale, operands.bias, half, TILE, workspace, tma=tma
        )
        check_close(got, operands.exact(codes=True), LIMIT[half])


@pytest.mark.parametrize(
    ("rows", "room", "tile_rows", "loaded"),
    [(40, 64, 64, 64), (40, 40, 64, 40), (40, 128, 64, 64), (40, 64, 128, 64), (64, 64, 64, 64), (130, 192, 64, 192)],
)
def test_tiles_are_filled_by_rows_that_memory_has(rows: int, room: int, tile_rows: int, loaded: int) -> None:
    x = torch.zeros(1 + room, 256, dtype=torch.int8)[1:][:rows]
    assert loaded_shape(x, tile_rows) == ([loaded, 256], [256, 1])


def test_rows_with_gaps_between_them_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"pass x\.contiguous"):
        loaded_shape(torch.zeros(64, 512, dtype=torch.int8)[:, :256], 64)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("splits", "inputs"), [(2, 208), (2, 1024), (4, 528), (4, 96)])
def test_split_k_equals_the_whole_product(
    kind: str, splits: int, inputs: int, device: torch.device, half: torch.dtype, workspace: Any
) -> None:
    """With 96 inputs, three of the four programs have none."""
    operands = Operands(kind, 70, 90, inputs, device, biased=inputs == 208, half=half)
    tile = evolve(TILE, splits=splits)
    check(operands, tile, half, workspace)
    got, whole = (multiply(operands, one, torch.float32, workspace) for one in (tile, TILE))
    torch.testing.assert_close(got, whole, rtol=0 if kind == "int8" else 1e-5, atol=0 if kind == "int8" else 1e-4)


@pytest.mark.parametrize(("tile", "room"), [((64, 64), True), ((256, 256), False)])
def test_fits_limits_splits_to_the_workspace(tile: Any, room: bool) -> None:
    rows, outputs = tile
    split = W8A8Tile(rows=rows, outputs=outputs, warps=8, stages=3, splits=4)
    assert split.fits(128, 8192) == room
    assert evolve(split, splits=1).fits(2**16, 2**16)


def test_more_tiles_of_rows_than_one_swizzle_group(device: torch.device, half: torch.dtype, workspace: Any) -> None:
    check(Operands("int8", 300, 130, 128, device, half=half), TILE, torch.float32, workspace)


def test_a_nan_stays_in_its_row(device: torch.device, half: torch.dtype, workspace: Any) -> None:
    operands = Operands("int8", 40, 64, 128, device, half=half)
    operands.x_scale[3] = float("nan")
    assert multiply(operands, TILE, half, workspace).isnan().any(1).nonzero().tolist() == [[3]]


def test_matmul_takes_no_rows(device: torch.device, half: torch.dtype, workspace: Any) -> None:
    operands = Operands("int8", 0, 64, 128, device, half=half)
    assert multiply(operands, TILE, half, workspace).shape == (0, 64)


def test_default_tiles_occupy_all_multiprocessors_if_possible() -> None:
    assert [matmul_tile(64, outputs, 132) for outputs in (4096, 6144, 28672)] == [SMALL_TILES[0]] * 2 + [SMALL_TILES[1]]
    assert [matmul_tile(128, outputs, 132) for outputs in (4096, 6144, 28672)] == [MEDIUM_TILES[0]] * 2 + [LARGE_TILE]
    assert [matmul_tile(256, outputs, 132) for outputs in (4096, 6144, 8192)] == [*MEDIUM_TILES, MEDIUM_TILES[1]]
    assert matmul_tile(512, 6144, 132) == LARGE_TILE


@pytest.mark.gpu
@pytest.mark.parametrize(("weight_rows", "inputs"), [(6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("rows", [64, 257, 2048])
def test_products_equal_float64_at_real_sizes(
    rows: int, weight_rows: int, inputs: int, device: torch.device, half: torch.dtype, workspace: Any
) -> None:
    for kind in ("fp8", "int8"):
        operands = Operands(kind, rows, weight_rows, inputs, device, half=half)
        for tile in (*SMALL_TILES, *MEDIUM_TILES, LARGE_TILE):
            check(operands, tile, half, workspace)
            for splits in (2, 4):
                split = evolve(tile, splits=splits)
                if split.fits(rows, weight_rows):
                    check(operands, split, half, workspace)


@pytest.mark.gpu
def test_split_k_sums_do_not_depend_on_the_order_of_arrival(
    device: torch.device, half: torch.dtype, workspace: Any
) -> None:
    operands = Operands("fp8", 64, 4096, 4096, device, half=half)
    tile = W8A8Tile(rows=64, outputs=128, warps=4, stages=4, splits=4)
    first = multiply(operands, tile, torch.float32, workspace)
    for _ in range(50):
        assert torch.equal(multiply(operands, tile, torch.float32, workspace), first)
