"""The W4A16 kernel for few rows: machine code, choice of tiles, and results next to float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from attrs import evolve

from engine.core.layers import gelu_tanh_and_mul
from engine.ops.gemm.few_rows_tile import MAX_FEW_ROWS, FewRowsTile
from engine.ops.gemm.packed_layout import GroupedLayout
from engine.ops.gemm.weight_only_candidates import MMA_TILES, candidates
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import WeightOnlyShape, default_tile

from .few_rows import L1_SHARED, SMS, case, check_loop, compile_cases, products_of, shared_memory_of, tiles_of
from .test_weight_only import HOPPER, LLAMA, Operands, check, gated, linear

TILES = tiles_of(
    (16, 4, 4, 0, 3, 1),
    (16, 8, 1, 4, 2, 1),
    (32, 2, 1, 2, 8, 1),
    (16, 1, 1, 2, 8, 1),
    (64, 2, 1, 4, 4, 1),
    (32, 4, 2, 0, 2, 1),
    (64, 4, 1, 2, 4, 2),
    (32, 8, 1, 4, 2, 2),
    (16, 4, 2, 2, 4, 1),
    (16, 4, 3, 2, 3, 1),
    (32, 4, 2, 2, 3, 2),
)


def test_weights_go_from_memory_to_products_in_registers() -> None:
    scales = {"GROUPS": 2, "SCALE_DTYPE": "float16"}
    tiles = tiles_of((16, 4, 4, 0, 3, 1), (16, 8, 1, 4, 2, 1), (32, 2, 1, 2, 8, 1))
    cases = [
        case(tiles[0], ZERO_POINTS=False, POWER=128, **scales),
        case(tiles[1], ZERO_POINTS=True, POWER=128, **scales),
        case(tiles[2], ZERO_POINTS=False, POWER=1024, gated=True, half=True, **scales),
    ]
    compiled = compile_cases("engine.ops.gemm.w4a16_few_rows", "w4a16_few_rows_kernel", "*i32", cases)
    for tile, lines in zip(tiles, compiled, strict=True):
        products = products_of(lines)
        rows = tile.rows * tile.ahead
        assert len(products) == rows  # 16 rows of W and a block of 256 inputs take 16 products
        pairs = rows * 256 // 64
        loop = lines[products[0] : products[-1] + 1]
        assert sum("HFMA2" in line for line in lines) < 1.05 * pairs + 8
        assert sum(bool(re.search(r"\b(LOP3|SHF|PRMT)\b", line)) for line in loop) < 1.5 * pairs
        check_loop(lines)


def test_only_variants_for_few_rows_have_the_name_that_prefers_the_l1_cache() -> None:
    constants = {"ZERO_POINTS": False, "POWER": 128, "GROUPS": 2, "SCALE_DTYPE": "float16"}
    cases = [case(TILES[0], **constants), case(TILES[0], SEVERAL=True, **constants), case(MMA_TILES[0], **constants)]
    compiled = compile_cases("engine.ops.gemm.w4a16_few_rows", "w4a16_few_rows_kernel", "*i32", cases)
    names = [next(line for line in lines if line.startswith("Function:")) for lines in compiled]
    assert names == ["Function:w4a16_few_rows_kernel", *["Function:w4a16_more_rows_kernel"] * 2]


def shape_of(outputs: int, inputs: int, group: int = 128, *, is_gated: bool = False) -> WeightOnlyShape:
    return WeightOnlyShape(gated=is_gated, weight_rows=outputs, inputs=inputs, layout=GroupedLayout.choose(4, group))


@pytest.mark.parametrize(
    ("shape", "rows", "wgmma"),
    [
        (shape_of(4096, 4096), 9, True),
        (shape_of(4096, 4096), 1, False),
        (shape_of(4096, 4096, 32), 1, True),
        (shape_of(4096, 4092), 1, True),
        (evolve(shape_of(4096, 4096), layout=GroupedLayout.choose(8, 128)), 1, True),
    ],
    ids=str,
)
def test_other_kernels_serve_what_few_rows_tiles_do_not_support(shape: Any, rows: int, wgmma: bool) -> None:
    assert not isinstance(default_tile(shape, rows, SMS, HOPPER, wgmma=wgmma), FewRowsTile)


@pytest.mark.parametrize("outputs", [16, 1024, 4096, 6144, 7168, 28672, 34816, 128256])
@pytest.mark.parametrize("inputs", [64, 1024, 1536, 2048, 4096, 5120, 17408])
def test_default_tiles_have_registers_for_their_loads(outputs: int, inputs: int) -> None:
    for is_gated in (False, True):
        tile = default_tile(shape_of(outputs, inputs, is_gated=is_gated), 2, SMS, HOPPER, wgmma=True)
        assert isinstance(tile, FewRowsTile)
        assert tile.registers * tile.warps * 32 * tile.programs <= 65536
        loaded = tile.rows // tile.row_warps * tile.ahead + 4 * tile.x_ahead  # words of W and of x per thread
        assert loaded < tile.registers / 2
        assert shared_memory_of(tile) <= L1_SHARED


def test_default_tiles_run_at_the_same_time() -> None:
    for outputs, inputs, is_gated in (
        (6144, 4096, False),
        (4096, 4096, False),
        (28672, 4096, True),
        (4096, 14336, False),
        (7168, 5120, False),
        (5120, 17408, False),
        (6144, 2560, False),
    ):
        shape = shape_of(outputs, inputs, is_gated=is_gated)
        for rows in (1, 8):
            tile: Any = default_tile(shape, rows, SMS, HOPPER, wgmma=True)
            assert tile.grid(outputs, rows)[0] <= tile.programs * SMS


@pytest.mark.parametrize("inputs", [256, 896, 1024, 1152, 1536, 2048])
def test_default_tiles_of_few_inputs_need_one_loop_iteration(inputs: int) -> None:
    for outputs in range(256, 3 * 16 * SMS, 256):
        shape = shape_of(outputs, inputs)
        tile: Any = default_tile(shape, 2, SMS, HOPPER, wgmma=True)
        assert shape.blocks <= tile.warps // tile.row_warps * tile.ahead


def test_tiles_of_small_weights_are_tried_at_more_rows() -> None:
    def mma_tiles(shape: WeightOnlyShape, rows: int, *, wgmma: bool = True) -> list[Any]:
        found = candidates(shape, rows, SMS, HOPPER, wgmma=wgmma)
        return [tile for tile in found if isinstance(tile, FewRowsTile)]

    small = shape_of(4096, 1024)
    for rows in (16, 32):
        found = mma_tiles(small, rows)
        assert set(MMA_TILES) < set(found)
        assert next(tile.grid(4096, rows)[2] for tile in found if tile not in MMA_TILES) == rows // MAX_FEW_ROWS
    for shape, rows in ((small, 64), (shape_of(2048, 2048), 16), (shape_of(32768, 1024), 16)):
        assert not mma_tiles(shape, rows)
    assert not mma_tiles(small, 16, wgmma=False)


@pytest.fixture
def multiplier(hopper: torch.device) -> Any:
    return WeightOnlyMatmul(hopper)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*TILES, *MMA_TILES], ids=str)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group_size", [64, 128, 256, -1])
def test_each_layout_equals_float64(
    multiplier: Any, hopper: torch.device, group_size: int, kind: torch.dtype, zeros: bool, tile: Any
) -> None:
    scale_kind = torch.bfloat16 if group_size == 128 else torch.float16
    operands = Operands(5, 64, 2304, group_size, hopper, kind, zeros=zeros, scale_dtype=scale_kind)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, None, False, tile), linear(operands))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*TILES, *MMA_TILES], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (33, 64), (100, 576), (66, 832), (40, 4160)])
def test_sizes_that_are_no_multiples_of_a_tile(
    multiplier: Any, hopper: torch.device, outputs: int, inputs: int, tile: Any
) -> None:
    operands = Operands(3, outputs, inputs, 64, hopper, torch.bfloat16)
    bias = torch.randn(outputs, device=hopper).to(torch.bfloat16)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, bias, False, tile), linear(operands, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*TILES, *MMA_TILES], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 33])
def test_numbers_of_rows(multiplier: Any, hopper: torch.device, rows: int, tile: Any) -> None:
    operands = Operands(rows, 96, 1024, 128, hopper, torch.bfloat16, zeros=False)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, None, False, tile), linear(operands))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [*TILES, *MMA_TILES], ids=str)
@pytest.mark.parametrize(("outputs", "biased"), [(64, False), (80, True), (24, True)])
def test_gated_products_equal_float64(
    multiplier: Any, hopper: torch.device, outputs: int, biased: bool, tile: Any
) -> None:
    operands = Operands(6, outputs, 1536, 64, hopper, torch.bfloat16)
    bias = torch.randn(outputs, device=hopper).to(torch.bfloat16) if biased else None
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, bias, True, tile), gated(operands, bias))
    found = multiplier.multiply_by_tile(operands.x, operands.matrix, bias, True, tile, "gelu_tanh")
    check(found, gelu_tanh_and_mul(linear(operands, bias)))


@pytest.mark.gpu
def test_each_weight_is_exact(multiplier: Any, hopper: torch.device) -> None:
    """Products of one input are weights, which bfloat16 and float16 hold exactly here."""
    for kind in (torch.bfloat16, torch.float16):
        for zeros in (False, True):
            operands = Operands(8, 64, 256, 128, hopper, kind, zeros=zeros)
            for first in range(0, 256, 64):
                x = torch.zeros(8, 256, dtype=kind, device=hopper)
                x[torch.arange(8), first + torch.arange(8) * 8] = 1
                found = multiplier.multiply_by_tile(x, operands.matrix, None, False, TILES[0])
                exact = (x.double() @ operands.weight.T).to(kind)
                torch.testing.assert_close(found, exact, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(("outputs", "inputs"), LLAMA)
def test_default_tiles_equal_float64_at_real_sizes(
    multiplier: Any, hopper: torch.device, outputs: int, inputs: int, rows: int, kind: torch.dtype
) -> None:
    operands = Operands(rows, outputs, inputs, 128, hopper, kind, zeros=False)
    check(multiplier(operands.x, operands.matrix), linear(operands))
    check(multiplier(operands.x, operands.matrix, gated=True), gated(operands))
