"""The W8A16 kernel for few rows: machine code, choice of tiles, and results next to float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.ops.gemm.few_rows_tile import FewRowsTile
from engine.ops.gemm.packed_layout import PackedMatrix, W8Layout
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import WeightOnlyShape, default_tile

from .few_rows import L1_SHARED, SMS, case, check_loop, compile_cases, products_of, shared_memory_of, tiles_of
from .test_weight_only import HOPPER, LLAMA, check
from .w8a8 import Operands

FLOAT8, INT8 = W8Layout(dtype="float8_e4m3fn"), W8Layout(dtype="int8")
TILES = tiles_of(
    (16, 4, 4, 0, 3, 1),
    (16, 8, 2, 4, 2, 1),
    (32, 2, 1, 2, 8, 1),
    (64, 4, 2, 2, 4, 4),
    (32, 4, 2, 2, 4, 2),
    (16, 4, 1, 2, 4, 1, 2),
    (16, 8, 1, 2, 2, 1, 3),
    (32, 4, 1, 2, 4, 2, 2),
    (16, 4, 3, 2, 4, 1),
    (32, 4, 3, 2, 4, 2),
)


def test_weights_go_from_memory_to_products_in_registers() -> None:
    small, gated, split = tiles_of((16, 4, 2, 2, 4, 1), (32, 2, 1, 2, 8, 1), (16, 4, 2, 2, 4, 1, 3))
    kinds = [
        (small, True, False),
        (split, True, False),
        (gated, True, False),
        (small, False, False),
        (small, True, True),
        (small, False, True),
    ]
    cases = [case(tile, gated=tile is gated, half=half, IS_FLOAT8=is_float8) for tile, is_float8, half in kinds]
    compiled = compile_cases("engine.ops.gemm.w8a16_few_rows", "w8a16_few_rows_kernel", "*fp32", cases)
    for (tile, is_float8, half), lines in zip(kinds, compiled, strict=True):
        rows = tile.rows * tile.ahead
        assert len(products_of(lines)) == rows // 2  # 16 rows of W and a block of 128 inputs take 8 products
        pairs = rows * 128 // 64
        # 4 instructions per pair of float8 in bfloat16, else 2 or 2.5.
        most = {"F2FP": 2.1, "HADD2": 2} if is_float8 and not half else {"F2FP": 1.1, "PRMT": 1.1}
        most = most if is_float8 else {"HFMA2": 1.1, "LOP3": 1.2, "SHF": 0.6}
        for name in ("F2FP", "HADD2", "HFMA2", "LOP3", "SHF", "PRMT"):
            assert sum(f"{name}" in line for line in lines) <= most.get(name, 0) * pairs + 32, name
        check_loop(lines)


def shape_of(outputs: int, inputs: int, layout: W8Layout, *, is_gated: bool = False) -> WeightOnlyShape:
    return WeightOnlyShape(gated=is_gated, weight_rows=outputs, inputs=inputs, layout=layout)


@pytest.mark.parametrize(
    ("outputs", "inputs", "layout", "rows", "wgmma"),
    [
        (4096, 4096, INT8, 9, True),
        (4096, 4096, INT8, 1, False),
        (4096, 4092, INT8, 1, True),
        (2048, 4096, FLOAT8, 1, True),
        (128256, 4096, FLOAT8, 1, True),
        (4096, 4096, W8Layout(dtype="float8_e4m3fn", scale_rows=128), 1, True),
    ],
)
def test_other_kernels_serve_what_few_rows_tiles_do_not_support(
    outputs: int, inputs: int, layout: W8Layout, rows: int, wgmma: bool
) -> None:
    tile = default_tile(shape_of(outputs, inputs, layout), rows, SMS, HOPPER, wgmma=wgmma)
    assert not isinstance(tile, FewRowsTile)


@pytest.mark.parametrize("outputs", [1024, 2752, 4096, 4416, 5120, 6144, 7168, 28672, 34816, 65536])
@pytest.mark.parametrize("inputs", [1024, 2048, 3072, 4096, 5120, 17408])
def test_default_tiles_have_registers_for_their_loads(outputs: int, inputs: int) -> None:
    for rows in (1, 8):
        shape = shape_of(outputs, inputs, INT8, is_gated=outputs > 8192)
        tile = default_tile(shape, rows, SMS, HOPPER, wgmma=True)
        assert isinstance(tile, FewRowsTile)
        assert tile.registers * tile.warps * 32 * tile.programs <= 65536
        loaded = tile.rows // tile.row_warps * tile.ahead + 8 * tile.x_ahead  # words of W and of x per thread
        assert loaded < tile.registers * 0.7
        assert tile.x_ahead // 2 in (0, 1) or tile.ahead % (tile.x_ahead // 2) == 0
        assert shared_memory_of(tile) <= L1_SHARED
        share = -(-shape.blocks // tile.splits)
        assert share * (tile.splits - 1) < shape.blocks
        assert tile.splits == 1 or tile.grid(outputs, rows)[0] * tile.splits <= tile.programs * SMS


@pytest.mark.parametrize(
    ("outputs", "inputs", "is_gated", "warps", "splits"),
    [
        (4096, 14336, False, 8, 1),  # two programs per multiprocessor, but for a few
        (2752, 15040, False, 4, 3),  # 516 of 528 programs
        (4416, 16192, False, 2, 3),  # 276 of 528 programs of four warps, 828 of 1056 of two
        (6464, 17664, False, 4, 1),  # 404 of 528 programs of four warps
        (4608, 3200, False, 4, 1),  # few inputs
        (1792, 3072, False, 2, 3),  # with few rows of W, too
        (1024, 3072, False, 4, 3),  # with fewer, four warps
        (1152, 3584, False, 4, 4),
        (1088, 5632, False, 4, 6),
        (1024, 2048, False, 4, 1),
        (10240, 5120, False, 2, 1),  # more tiles than programs of four warps
        (12288, 2048, True, 4, 1),
    ],
)
def test_programs_are_as_many_as_can_run_at_the_same_time(
    outputs: int, inputs: int, is_gated: bool, warps: int, splits: int
) -> None:
    for layout in (INT8, FLOAT8):
        tile = default_tile(shape_of(outputs, inputs, layout, is_gated=is_gated), 2, SMS, HOPPER, wgmma=True)
        assert isinstance(tile, FewRowsTile)
        assert (tile.warps, tile.splits) == (warps, splits)


def test_int8_has_three_programs_of_eight_warps_where_float8_has_splits() -> None:
    tiles = [default_tile(shape_of(5120, 17408, layout), 2, SMS, HOPPER, wgmma=True) for layout in (INT8, FLOAT8)]
    assert [(tile.warps, tile.splits) for tile in tiles if isinstance(tile, FewRowsTile)] == [(8, 1), (2, 3)]


@pytest.mark.parametrize(
    ("outputs", "inputs", "is_gated", "rows", "ahead"),
    [
        (1920, 1024, False, 16, 2),
        (1920, 1088, False, 16, 3),
        (1920, 1536, False, 16, 3),
        (1920, 1600, False, 16, 2),
        (11264, 1152, True, 32, 3),
        (7168, 1152, True, 32, 3),
        (7168, 1024, True, 16, 2),
        (4096, 1152, True, 16, 3),
        (18432, 1152, True, 64, 2),
    ],
)
def test_nine_to_twelve_blocks_of_inputs_are_loaded_three_at_a_time(
    outputs: int, inputs: int, is_gated: bool, rows: int, ahead: int
) -> None:
    for layout in (INT8, FLOAT8):
        tile = default_tile(shape_of(outputs, inputs, layout, is_gated=is_gated), 5, SMS, HOPPER, wgmma=True)
        assert isinstance(tile, FewRowsTile)
        assert (tile.rows, tile.warps, tile.ahead) == (rows, 4, ahead)


def test_one_row_of_small_float8_weights_has_other_kernels() -> None:
    for layout, inputs, is_few in ((FLOAT8, 2048, False), (INT8, 2048, True), (FLOAT8, 16384, True)):
        tile = default_tile(shape_of(4096 - 16, inputs, layout), 1, SMS, HOPPER, wgmma=True)
        assert isinstance(tile, FewRowsTile) == is_few


def matrix_of(operands: Any) -> PackedMatrix:
    layout = W8Layout(dtype=str(operands.weight.dtype).removeprefix("torch."))
    return PackedMatrix(packed=layout.as_words(layout.pack(operands.weight)), scales=operands.scale, layout=layout)


@pytest.fixture
def multiplier(hopper: torch.device) -> Any:
    return WeightOnlyMatmul(hopper)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (33, 64), (100, 576), (66, 840), (40, 4160)])
def test_products_equal_float64(
    multiplier: Any, hopper: torch.device, outputs: int, inputs: int, kind: str, half: torch.dtype, tile: Any
) -> None:
    operands = Operands(kind, 3, outputs, inputs, hopper, biased=True, half=half)
    found = multiplier.multiply_by_tile(operands.x, matrix_of(operands), operands.bias, False, tile)
    check(found, operands.exact(codes=False))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_numbers_of_rows(multiplier: Any, hopper: torch.device, kind: str, rows: int, tile: Any) -> None:
    operands = Operands(kind, rows, 96, 1024, hopper, half=torch.bfloat16)
    found = multiplier.multiply_by_tile(operands.x, matrix_of(operands), None, False, tile)
    check(found, operands.exact(codes=False))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("weight_rows", "biased"), [(64, False), (80, True), (24, True)])
def test_gated_products_equal_float64(
    multiplier: Any, hopper: torch.device, weight_rows: int, biased: bool, kind: str, tile: Any
) -> None:
    operands = Operands(kind, 6, weight_rows, 1536, hopper, biased=biased, half=torch.bfloat16)
    gate, up = operands.exact(codes=False).chunk(2, -1)
    found = multiplier.multiply_by_tile(operands.x, matrix_of(operands), operands.bias, True, tile)
    check(found, F.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_each_weight_is_exact(multiplier: Any, hopper: torch.device, kind: torch.dtype, half: torch.dtype) -> None:
    codes = torch.arange(256, device=hopper).to(torch.uint8).repeat(16, 1)
    if kind != torch.int8:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    layout = W8Layout(dtype=str(kind).removeprefix("torch."))  # type: ignore[arg-type]
    packed = layout.as_words(layout.pack(codes.view(kind)))
    matrix = PackedMatrix(packed=packed, scales=torch.ones(16, device=hopper), layout=layout)
    for first in range(0, 256, 8):
        x = torch.zeros(8, 256, dtype=half, device=hopper)
        x[torch.arange(8), first + torch.arange(8)] = 1
        found = multiplier.multiply_by_tile(x, matrix, None, False, TILES[0])
        assert torch.equal(found.double(), x.double() @ codes.view(kind).double().T)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("outputs", "inputs"), LLAMA)
def test_default_tiles_equal_float64_at_real_sizes(
    multiplier: Any, hopper: torch.device, outputs: int, inputs: int, kind: str, rows: int, half: torch.dtype
) -> None:
    operands = Operands(kind, rows, outputs, inputs, hopper, half=half)
    check(multiplier(operands.x, matrix_of(operands)), operands.exact(codes=False))
