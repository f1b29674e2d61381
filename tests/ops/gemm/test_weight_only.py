"""The weight-only GEMM, 4-bit and 8-bit weights, against float64: all layouts, tiles, epilogues, ragged sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve

from engine.core.layers import gelu_tanh_and_mul
from engine.ops.gemm.packed_layout import GroupedLayout, PackedMatrix, W8Layout
from engine.ops.gemm.skinny_launch import MAX_PARTIAL_SUMS, MAX_SPLIT_TILES
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import (
    COLUMNS,
    FINE_TILE,
    FINEST_TILE,
    LARGE_TILE,
    MAX_SPLITS,
    PREFETCHED_BLOCKS,
    SMALL_TILE,
    TILES,
    WEIGHT_ONLY_MAX_ROWS,
    WeightOnlyShape,
    WeightOnlyTile,
    WeightOnlyVectorTile,
    default_tile,
    with_splits,
)

from .w8a8 import Operands as CodeOperands

SMALL = WeightOnlyTile(rows=32, columns=16, warps=2, stages=3)
SHARED = evolve(SMALL, splits=3)
EARLY = WeightOnlyTile(rows=64, columns=32, warps=4, stages=2, scales_weights=True)
STEPS = evolve(EARLY, stages=3, step=64, splits=2)
"""Takes blocks in parts."""
AHEAD = WeightOnlyTile(rows=32, columns=8, warps=2, stages=6, splits=3, ahead=8)
"""Prefetches more blocks than a program multiplies; interpreted, it prefetches none."""
FINE = evolve(FINE_TILE, ahead=PREFETCHED_BLOCKS[4])
FINEST_SPLIT = evolve(FINEST_TILE, splits=3)
VECTOR = WeightOnlyVectorTile(rows=4, blocks=2, warps=2)
"""For one row of x; the interpreter takes long for more."""
LIMIT = {torch.float16: 2**-9, torch.bfloat16: 2**-6}
HOPPER = 227 * 2**10
"""Bytes of shared memory."""
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


@pytest.fixture
def multiplier(device: torch.device) -> Any:
    made = WeightOnlyMatmul(device)
    made.workspace.partials.fill_(float("nan"))
    return made


class Operands:
    """Random operands in the layout, and the weights they mean in float64."""

    def __init__(
        self,
        rows: Any,
        outputs: Any,
        inputs: Any,
        group_size: Any,
        device: Any,
        dtype: Any,
        *,
        bits: int = 4,
        zeros: bool = True,
        scale_dtype: Any = None,
    ) -> None:
        groups = 1 if group_size == -1 else -(-inputs // group_size)
        scale_dtype = scale_dtype or torch.float16
        values = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, device=device)
        scales = ((torch.rand(groups, outputs, device=device) + 0.5) / 2**bits).to(scale_dtype)
        offsets = torch.randint(0, 2**bits, (groups, outputs), dtype=torch.uint8, device=device) if zeros else None
        group_of = torch.arange(inputs, device=device) // (inputs if group_size == -1 else group_size)
        centre = 2 ** (bits - 1) if offsets is None else offsets.double()[group_of].T
        self.weight = (values.double() - centre) * scales.double()[group_of].T
        layout = GroupedLayout.choose(bits, group_size)
        packed, entries = layout.pack(values, scales, offsets, group_size, dtype)
        self.matrix = PackedMatrix(packed=packed, scales=entries, layout=layout)
        x = torch.full((rows + 2, inputs), float("nan"), device=device).to(dtype)  # NaN before and behind
        x[1:-1] = torch.randn(rows, inputs, device=device) / inputs**0.5
        self.x = x[1:-1]


def check(result: Any, exact: Any) -> None:
    assert result.shape == exact.shape
    error = float((result.double() - exact).norm() / exact.norm())
    assert error < LIMIT[result.dtype], error


def linear(operands: Any, bias: Any = None) -> Any:
    return F.linear(operands.x.double(), operands.weight, None if bias is None else bias.double())


def gated(operands: Any, bias: Any = None) -> Any:
    gate, up = linear(operands, bias).chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("tile", [SMALL, SHARED, EARLY, STEPS, AHEAD], ids=str)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (4, 128), (4, 256), (4, -1), (8, 32), (8, 128)])
def test_each_layout_equals_float64(
    multiplier: Any, device: torch.device, half: torch.dtype, bits: int, group_size: int, zeros: bool, tile: Any
) -> None:
    operands = Operands(5, 40, 768, group_size, device, half, bits=bits, zeros=zeros)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, None, False, tile), linear(operands))


@pytest.mark.parametrize("tile", [SMALL, SHARED, EARLY, STEPS, AHEAD], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 256), (33, 96), (8, 32), (100, 600), (66, 832)])
def test_sizes_that_are_no_multiples_of_a_tile(
    multiplier: Any, device: torch.device, half: torch.dtype, outputs: int, inputs: int, tile: Any
) -> None:
    operands = Operands(3, outputs, inputs, 32 if inputs % 64 else 64, device, half)
    bias = torch.randn(outputs, device=device).to(half)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, bias, False, tile), linear(operands, bias))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("inputs", [128, 512])
def test_one_output_is_multiplied(
    multiplier: Any, device: torch.device, half: torch.dtype, inputs: int, zeros: bool
) -> None:
    operands = Operands(3, 1, inputs, 64, device, half, zeros=zeros)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, None, False, SMALL), linear(operands))


@pytest.mark.parametrize("tile", [SMALL, SHARED, EARLY, STEPS, AHEAD], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_numbers_of_rows_around_a_tile(
    multiplier: Any, device: torch.device, half: torch.dtype, rows: int, tile: Any
) -> None:
    operands = Operands(rows, 64, 512, 128, device, half, zeros=False)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, None, False, tile), linear(operands))


@pytest.mark.parametrize("tile", [SMALL, SHARED, EARLY, STEPS, AHEAD, FINEST_TILE], ids=str)
@pytest.mark.parametrize(("outputs", "biased"), [(64, False), (80, True)])
def test_gated_products_equal_float64(
    multiplier: Any, device: torch.device, half: torch.dtype, outputs: int, biased: bool, tile: Any
) -> None:
    operands = Operands(6, outputs, 512, 64, device, half)
    bias = torch.randn(outputs, device=device).to(half) if biased else None
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, bias, True, tile), gated(operands, bias))


@pytest.mark.parametrize("tile", [SMALL, VECTOR], ids=str)
def test_gated_by_another_activation(multiplier: Any, device: torch.device, half: torch.dtype, tile: Any) -> None:
    operands = Operands(1, 64, 512, 64, device, half)
    found = multiplier.multiply_by_tile(operands.x, operands.matrix, None, True, tile, "gelu_tanh")
    check(found, gelu_tanh_and_mul(linear(operands)))
    found = multiplier(operands.x, operands.matrix, gated=True, activation="gelu_tanh")
    check(found, gelu_tanh_and_mul(linear(operands)))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (4, 128), (4, -1), (8, 32), (8, 128)])
def test_vector_tile_multiplies_one_row(
    multiplier: Any, device: torch.device, half: torch.dtype, bits: int, group_size: int, zeros: bool
) -> None:
    operands = Operands(1, 10, 768, group_size, device, half, bits=bits, zeros=zeros)
    bias = torch.randn(10, device=device).to(half)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, bias, False, VECTOR), linear(operands, bias))


def test_vector_tile_multiplies_a_part_of_a_block(multiplier: Any, device: torch.device, half: torch.dtype) -> None:
    operands = Operands(1, 7, 352, 32, device, half)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, None, False, VECTOR), linear(operands))


def test_vector_tile_multiplies_one_gated_row(multiplier: Any, device: torch.device, half: torch.dtype) -> None:
    operands = Operands(1, 12, 512, 64, device, half)
    bias = torch.randn(12, device=device).to(half)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, bias, True, VECTOR), gated(operands, bias))


def test_rows_multiplied_one_by_one_equal_the_batch(multiplier: Any, device: torch.device, half: torch.dtype) -> None:
    operands = Operands(3, 8, 256, 128, device, half, zeros=False)
    check(multiplier.multiply_by_tile(operands.x, operands.matrix, None, False, VECTOR), linear(operands))


def test_split_k_counters_are_reset_to_zero(multiplier: Any, device: torch.device, half: torch.dtype) -> None:
    operands = Operands(4, 64, 2048, 128, device, half)
    first, second = (multiplier.multiply_by_tile(operands.x, operands.matrix, None, False, SHARED) for _ in range(2))
    assert torch.equal(first, second)
    assert not multiplier.workspace.arrivals.any()


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 128), (8, 64)])
def test_dequantized_weights_are_rounded_once(
    multiplier: Any, device: torch.device, half: torch.dtype, bits: int, group_size: int, kind: torch.dtype
) -> None:
    operands = Operands(1, 50, 352, 32 if group_size == 32 else -1, device, half, bits=bits, scale_dtype=kind)
    dequantized = multiplier.dequantize(operands.matrix, operands.x)
    torch.testing.assert_close(dequantized, operands.weight.to(half), rtol=0, atol=0)


def test_many_rows_are_multiplied_by_the_library(multiplier: Any, device: torch.device, half: torch.dtype) -> None:
    operands = Operands(WEIGHT_ONLY_MAX_ROWS + 1, 64, 128, 64, device, half)
    bias = torch.randn(64, device=device).to(half)
    check(multiplier(operands.x, operands.matrix, bias), linear(operands, bias))
    check(multiplier(operands.x, operands.matrix, bias, gated=True), gated(operands, bias))


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_call_chooses_a_tile(multiplier: Any, device: torch.device, half: torch.dtype, rows: int) -> None:
    operands = Operands(rows, 96, 512, 128, device, half)
    if rows == 0:
        assert multiplier(operands.x, operands.matrix).shape == (0, 96)
        return
    check(multiplier(operands.x, operands.matrix), linear(operands))
    check(multiplier(operands.x, operands.matrix, gated=True), gated(operands))


def test_gather_reorders_inputs(multiplier: Any, device: torch.device, half: torch.dtype) -> None:
    x = torch.randn(3, 5000, device=device).to(half)
    order = torch.randperm(5000, device=device).to(torch.int32)
    assert torch.equal(multiplier.gather(x, order), x[:, order.long()])


LAYOUTS = [GroupedLayout.choose(4, 64), W8Layout(dtype="int8"), W8Layout(dtype="float8_e4m3fn", scale_rows=128)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rows", [2, 16, 17, 64, 200, 256])
@pytest.mark.parametrize(("outputs", "inputs"), [*LLAMA, (256, 64), (128256, 4096)])
def test_tiles_fit_the_workspace(rows: int, outputs: Any, inputs: Any, layout: Any) -> None:
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=outputs, inputs=inputs, layout=layout)
    tile = default_tile(gemm_shape, rows, 132, HOPPER)
    assert tile.columns >= min(rows, COLUMNS[-1])
    assert tile.splits <= max(1, min(MAX_SPLITS, gemm_shape.blocks))
    if tile.splits > 1:
        programs = tile.programs(gemm_shape, rows)
        assert programs <= MAX_SPLIT_TILES
        assert programs * tile.splits * tile.rows * tile.columns <= MAX_PARTIAL_SUMS
    assert default_tile(gemm_shape, WEIGHT_ONLY_MAX_ROWS + 1, 132, HOPPER) is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("shared", "most_stages"), [(HOPPER, 6), (164 * 2**10 - 1024, 6), (99 * 2**10, 6), (48 * 2**10, 5)]
)
def test_tiles_fit_shared_memory(layout: Any, shared: Any, most_stages: int) -> None:
    for rows in (2, 16, 32, 64, 128, 256):
        gemm_shape = WeightOnlyShape(gated=False, weight_rows=4096, inputs=4096, layout=layout)
        tile = default_tile(gemm_shape, rows, 132, shared)
        assert tile.shared_memory(layout) <= shared
        assert tile.stages <= most_stages or tile.rows <= FINE_TILE.rows  # the smallest
    assert default_tile(gemm_shape, 16, 132, 2**12) is None


def test_shared_memory_equals_the_compilers() -> None:
    """For compute capability 9.0, by Triton 3.6 and 3.7."""
    four, eight = GroupedLayout.choose(4, 128), W8Layout(dtype="float8_e4m3fn")
    for tile, layout, compiled in (
        (TILES[128], four, 115712),
        (evolve(TILES[128], step=256), four, 230400),
        (TILES[64], four, 115200),
        (evolve(LARGE_TILE, stages=6), four, 104960),
        (TILES[128], eight, 131072),
        (TILES[16], eight, 106496),
    ):
        assert tile.shared_memory(layout) == pytest.approx(compiled, rel=0.07)


@pytest.mark.parametrize(
    ("layout", "outputs", "inputs", "one", "few"),
    [
        (W8Layout(dtype="int8"), 4096, 4096, WeightOnlyVectorTile(rows=4, blocks=8, warps=2), FINEST_TILE),
        (W8Layout(dtype="int8"), 4096, 4224, WeightOnlyVectorTile(rows=4, blocks=8, warps=2), FINE_TILE),
        (W8Layout(dtype="int8"), 1024, 2048, WeightOnlyVectorTile(rows=2, blocks=8, warps=2), FINEST_TILE),
        (W8Layout(dtype="int8"), 28672, 4096, LARGE_TILE, LARGE_TILE),
        (W8Layout(dtype="int8"), 4096, 4095, SMALL_TILE, FINEST_TILE),
        (GroupedLayout.choose(4, 128), 1024, 2048, WeightOnlyVectorTile(rows=2, blocks=8, warps=2), FINE),
        (GroupedLayout.choose(4, 32), 1024, 2048, WeightOnlyVectorTile(rows=2, blocks=16, warps=2), FINE),
        (GroupedLayout.choose(4, 128), 4096, 14336, LARGE_TILE, LARGE_TILE),
        (GroupedLayout.choose(8, 128), 4096, 14336, WeightOnlyVectorTile(rows=4, blocks=8, warps=2), LARGE_TILE),
    ],
)
def test_default_tiles_for_one_row_and_few(layout: Any, outputs: int, inputs: int, one: Any, few: Any) -> None:
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=outputs, inputs=inputs, layout=layout)
    for rows, expected in ((1, one), (2, few), (8, few)):
        tile = default_tile(gemm_shape, rows, 132, HOPPER)
        if isinstance(tile, WeightOnlyTile):
            tile = evolve(tile, splits=1, step=expected.step)
        assert tile == expected


def test_few_tiles_are_split_and_many_are_not() -> None:
    layout = GroupedLayout.choose(4, 128)
    tile = WeightOnlyTile(rows=64, columns=16, warps=4, stages=4)
    few = WeightOnlyShape(gated=False, weight_rows=4096, inputs=14336, layout=layout)
    many = evolve(few, weight_rows=128256)
    assert with_splits(tile, few, 1, 132).splits > 1
    assert with_splits(tile, many, 1, 132).splits == 1


def each_code(dtype: Any, device: Any) -> Any:
    """[2, 128], those that are numbers."""
    codes = torch.arange(256, device=device).to(torch.uint8).view(dtype)
    return torch.where(codes.float().isnan(), torch.zeros_like(codes).float(), codes.float()).to(dtype).view(2, 128)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_each_w8_value_is_dequantized_exactly(
    multiplier: Any, device: torch.device, half: torch.dtype, dtype: torch.dtype
) -> None:
    codes = each_code(dtype, device)
    layout = W8Layout(dtype=str(dtype).removeprefix("torch."))
    matrix = PackedMatrix(
        packed=layout.as_words(layout.pack(codes)), scales=torch.ones(2, device=device), layout=layout
    )
    x = torch.eye(128, device=device, dtype=half)
    for tile in (SMALL, evolve(SMALL, columns=64), WeightOnlyVectorTile(rows=2, blocks=1, warps=1)):
        assert torch.equal(multiplier.multiply_by_tile(x, matrix, None, False, tile).float(), codes.float().T)
    assert torch.equal(multiplier.dequantize(matrix, x).float(), codes.float())


@pytest.mark.parametrize("tile", [SMALL, SHARED, EARLY, STEPS, AHEAD, FINEST_SPLIT], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 384), (66, 200), (8, 64)])
@pytest.mark.parametrize(("kind", "scale_rows"), [("fp8", 0), ("int8", 0), ("fp8", 4), ("fp8", 128)])
def test_w8_products_equal_float64(
    multiplier: Any,
    device: torch.device,
    half: torch.dtype,
    kind: str,
    scale_rows: int,
    outputs: int,
    inputs: int,
    tile: Any,
) -> None:
    operands = CodeOperands(kind, 5, outputs, inputs, device, scale_rows=scale_rows, biased=True, half=half)
    matrix = w8_matrix(operands, scale_rows)
    exact = operands.exact(codes=False)
    check(multiplier.multiply_by_tile(operands.x, matrix, operands.bias, False, tile), exact)
    gate, up = exact.chunk(2, -1)
    check(multiplier.multiply_by_tile(operands.x, matrix, operands.bias, True, tile), F.silu(gate) * up)
    check(multiplier.dequantize_and_multiply(operands.x, matrix, operands.bias, False), exact)


@pytest.mark.parametrize(("kind", "scale_rows"), [("fp8", 0), ("int8", 0), ("fp8", 4), ("fp8", 128)])
def test_vector_tile_multiplies_one_w8_row(
    multiplier: Any, device: torch.device, half: torch.dtype, kind: str, scale_rows: int
) -> None:
    operands = CodeOperands(kind, 1, 10, 328, device, scale_rows=scale_rows, biased=True, half=half)
    matrix = w8_matrix(operands, scale_rows)
    exact = operands.exact(codes=False)
    check(multiplier.multiply_by_tile(operands.x, matrix, operands.bias, False, VECTOR), exact)
    gate, up = exact.chunk(2, -1)
    check(multiplier.multiply_by_tile(operands.x, matrix, operands.bias, True, VECTOR), F.silu(gate) * up)


def w8_matrix(operands: Any, scale_rows: Any) -> Any:
    layout = W8Layout(dtype=str(operands.weight.dtype).removeprefix("torch."), scale_rows=scale_rows)
    return PackedMatrix(packed=layout.as_words(layout.pack(operands.weight)), scales=operands.scale, layout=layout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 32, 64, 200, 256])
@pytest.mark.parametrize(("outputs", "inputs"), LLAMA)
@pytest.mark.parametrize(("kind", "scale_rows"), [("fp8", 0), ("int8", 0), ("fp8", 128)])
def test_w8_products_equal_float64_at_real_sizes(
    multiplier: Any,
    device: torch.device,
    dtype: torch.dtype,
    kind: str,
    scale_rows: int,
    rows: int,
    outputs: Any,
    inputs: Any,
) -> None:
    operands = CodeOperands(kind, rows, outputs, inputs, device, scale_rows=scale_rows, half=dtype)
    check(multiplier(operands.x, w8_matrix(operands, scale_rows)), operands.exact(codes=False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 16, 32, 64, 128, 200, 256, 300])
@pytest.mark.parametrize(("outputs", "inputs"), LLAMA)
def test_products_equal_float64_at_real_sizes(
    multiplier: Any, device: torch.device, dtype: torch.dtype, rows: int, outputs: Any, inputs: Any
) -> None:
    operands = Operands(rows, outputs, inputs, 128, device, dtype, zeros=rows % 2 == 0)
    check(multiplier(operands.x, operands.matrix), linear(operands))
    check(multiplier(operands.x, operands.matrix, gated=True), gated(operands))


def tried(gemm_shape: Any, rows: Any) -> Any:
    """The tile chosen, with other numbers of warps and stages."""
    tile = default_tile(gemm_shape, rows, 132, HOPPER)
    if isinstance(tile, WeightOnlyVectorTile):
        return [tile, evolve(tile, rows=8), evolve(tile, warps=4, blocks=2 * tile.blocks)]
    warps_tried = {tile.warps, 4 if tile.columns <= 64 else tile.warps}  # four have no registers for more sums
    return [evolve(tile, warps=warps, stages=stages) for warps in warps_tried for stages in (2, tile.stages)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 256])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (4, 128), (4, -1), (8, 32), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zeros", [False, True])
def test_tiles_with_other_warps_and_stages_equal_float64(
    multiplier: Any, device: torch.device, dtype: torch.dtype, zeros: bool, bits: int, group_size: int, rows: int
) -> None:
    operands = Operands(rows, 4096, 4096, group_size, device, dtype, bits=bits, zeros=zeros)
    gemm_shape = WeightOnlyShape(gated=False, weight_rows=4096, inputs=4096, layout=operands.matrix.layout)
    exact = linear(operands)
    for tile in tried(gemm_shape, rows):
        check(multiplier.multiply_by_tile(operands.x, operands.matrix, None, False, tile), exact)
