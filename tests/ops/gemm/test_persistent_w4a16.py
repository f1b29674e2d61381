"""The persistent W4A16 kernels: machine code, choice of tiles, how programs share them, and results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from attrs import evolve

from engine.ops.common.polling import EMPTY
from engine.ops.gemm.packed_layout import GroupedLayout, PackedMatrix, W8Layout
from engine.ops.gemm.persistent_tile import SIZES, TIMES, PersistentTile, tile_for_rows
from engine.ops.gemm.weight_only_candidates import (
    MEASURED_CLASSES,
    PERSISTENT_CLASSES,
    candidates,
)
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import (
    WeightOnlyShape,
    default_tile,
)

from .test_weight_only import HOPPER, LLAMA, Operands, check, gated, linear

SMS = 132
STREAM_K = [
    PersistentTile(rows=rows, columns=columns)
    for rows, columns in (
        (128, 32),
        (256, 32),
        (128, 64),
        (256, 64),
        (128, 128),
        (256, 128),
        (128, 160),
        (128, 192),
        (128, 256),
    )
]
SPLIT = [
    PersistentTile(rows=rows, columns=columns, splits=splits)
    for rows, columns, splits in ((256, 32, 8), (128, 32, 2), (256, 64, 4), (128, 64, 8), (128, 128, 4))
]
TILES = [*STREAM_K, *SPLIT]
COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from engine.ops.gemm import persistent_w4a16, specialized_w4a16
from engine.ops.gemm.persistent_w4a16_launch import _constants_of
from engine.ops.gemm.skinny import GATED, PLAIN
from engine.ops.gemm.persistent_tile import SIZES, TIMES, PersistentTile, tile_for_rows

def block(kind, *shape):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return f"tensordesc<{kind}[{', '.join(map(str, shape))}],{layout!r}>"

def compiled(rows, columns, splits, gated, zeros):
    tile = PersistentTile(rows=rows, columns=columns, splits=splits)
    constants = {
        **_constants_of(tile), "GROUPS": 2, "SCALE_DTYPE": gl.float16, "POWER": 128, "ZERO_POINTS": zeros,
        "EPILOGUE": (GATED if gated else PLAIN).value, "BIAS": True, "PDL": True,
    }
    kernel = (specialized_w4a16 if tile.is_specialized else persistent_w4a16).matmul_kernel
    words = block("i16", 1, 8, 2, 8, 64) if gated else block("i16", 128, 64)
    types = {
        "out": "*bf16" if splits > 1 else block("bf16", tile.rest or columns, 64 if gated else 128),
        "x": block("bf16", columns - tile.rest, 64), "packed": words, "scales": "*i32", "bias": "*bf16",
        "partials": "*i32" if splits > 1 else "*fp32", "arrivals": "*i32",
    }
    if tile.rest:
        types["rest"] = block("bf16", tile.rest, 64)
    names = kernel.arg_names
    if "rest" in names and not tile.rest:
        constants["rest"] = None
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in types if types[name].startswith("*")] + ["weight_rows"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, values, attributes)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": tile.warps, "launch_pdl": True})
    groups = 2 if tile.rest else 1
    products = rows // 128 * 4 * groups
    pending = tile.pending * groups
    return {"sass": made.asm["sass"], "shared": made.metadata.shared, "products": products, "pending": pending}

cases = (128, 32, 1, False, False), (256, 64, 4, False, False), (128, 128, 1, False, True), (256, 128, 1, True, True)
cases += (128, 160, 1, True, False), (128, 192, 1, False, True)
print(json.dumps([compiled(*case) for case in (*cases, (128, 256, 1, True, False))]))
"""


def test_weights_are_unpacked_while_products_are_in_flight() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for made in json.loads(done.stdout):
        assert made["shared"] <= HOPPER
        lines = made["sass"].splitlines()
        products = [number for number, line in enumerate(lines) if "HGMMA" in line]
        loop = lines[products[0] : products[-1] + 1]
        assert len(products) == 4 * made["products"]  # of 16 inputs each
        waits = [line for line in lines[products[0] :] if "WARPGROUP.DEPBAR" in line]
        assert len(waits) == made["products"] // made["pending"] + 1  # and one at the end of a tile
        assert all(f"0x{made['pending']}" in line for line in waits[:-1])
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in loop)


def shape_of(outputs: int, inputs: int, group: int = 128) -> WeightOnlyShape:
    return WeightOnlyShape(gated=False, weight_rows=outputs, inputs=inputs, layout=GroupedLayout.choose(4, group))


def is_split(tile: Any) -> bool:
    return isinstance(tile, PersistentTile) and tile.splits > 1


def test_persistent_tiles_serve_many_rows_of_gpus_with_wgmma() -> None:
    shape = shape_of(4096, 4096)
    found = {rows: default_tile(shape, rows, SMS, HOPPER, wgmma=True) for rows in (64, 65, 128, 129, 512, 513)}
    assert {rows: tile for rows, tile in found.items() if isinstance(tile, PersistentTile)} == {
        65: PersistentTile(columns=128),
        128: PersistentTile(columns=128),
        129: PersistentTile(columns=256),
        512: PersistentTile(columns=256),
    }
    assert found[64] == default_tile(shape, 64, SMS, HOPPER)
    assert found[513] is None


@pytest.mark.parametrize("rows", [*MEASURED_CLASSES, *PERSISTENT_CLASSES])
def test_the_default_is_the_first_of_distinct_candidates(rows: int) -> None:
    for outputs, inputs in LLAMA:
        shape = shape_of(outputs, inputs)
        found = candidates(shape, rows, SMS, HOPPER, wgmma=True)
        assert found[0] == default_tile(shape, rows, SMS, HOPPER, wgmma=True)
        assert len(set(found)) == len(found)
        assert any(isinstance(tile, PersistentTile) for tile in found) == (rows > 16)
        assert all(tile.can_split(outputs, shape.blocks, rows, SMS) for tile in found if is_split(tile))
        assert (None in found) == (rows in PERSISTENT_CLASSES)


def test_other_layouts_and_unaligned_rows_keep_the_other_tiles() -> None:
    shape = shape_of(4096, 4096)
    assert PersistentTile.supports(shape)
    others = [
        shape_of(4096, 4096, group=32),
        shape_of(4096, 4092),
        shape_of(4092, 4096),
        evolve(shape, gated=True, weight_rows=4104),
        evolve(shape, layout=GroupedLayout.choose(8, 128)),
        evolve(shape, layout=W8Layout(dtype="int8")),
    ]
    for other in others:
        assert not PersistentTile.supports(other)
        assert candidates(other, 256, SMS, HOPPER, wgmma=True) == candidates(other, 256, SMS, HOPPER)
        assert default_tile(other, 256, SMS, HOPPER, wgmma=True) == default_tile(other, 256, SMS, HOPPER)


@pytest.mark.parametrize("tile", STREAM_K, ids=str)
def test_as_many_programs_as_share_the_units_evenly(tile: PersistentTile) -> None:
    assert tile.programs(2 * SMS * 256, 16, tile.columns, SMS) == SMS
    tiles = 4096 // tile.rows
    assert tile.programs(4096, 16, tile.columns, SMS) == 128 == tiles * 16 // (tiles // 8)  # equal numbers of units
    assert tile.programs(128, 3, 1, SMS) == (1 if tile.size in TIMES else 3)  # adding sums takes longer
    if tile.is_specialized:  # tiles nearly fill the GPU: none is shared
        assert tile.programs(112 * tile.rows, 16, 1, SMS) == 112
    assert tile.rows * tile.columns <= PersistentTile.max_sums


def test_tiles_of_few_blocks_are_not_shared() -> None:
    tile = PersistentTile(columns=128)
    assert tile.programs(11776, 5, 128, SMS) == 92
    assert tile.programs(11776, 5, 256, SMS) == 92  # two tiles each
    assert tile.programs(4096, 56, 128, SMS) == 128


def test_another_tile_is_used_where_it_is_predicted_to_be_faster() -> None:
    def found(rows: int, weight_rows: int, blocks: int, **chosen: Any) -> tuple[int, int]:
        return tile_for_rows(PersistentTile(**chosen), weight_rows, blocks, rows, SMS).size

    for rows, columns in ((144, 160), (190, 192), (256, 256)):
        assert found(rows, 28672, 16, columns=256) == (128, columns)
    assert found(300, 4096, 56, columns=256) == (128, 160)
    assert found(600, 6144, 16, columns=256) == (256, 128)
    assert found(128, 28672, 16, columns=128) == (128, 128)  # measured
    # With many waves, smaller gains count.
    assert found(520, 57344, 32, columns=256) == (128, 192)
    assert found(792, 57344, 32, columns=256) == (256, 128)
    assert found(1600, 57344, 32, columns=256) == (256, 128)
    assert found(8192, 28672, 16, columns=256) == (128, 256)
    assert tile_for_rows(PersistentTile(columns=64, splits=2), 4096, 56, 144, SMS).splits == 2


def test_a_tile_that_was_measured_with_as_many_tiles_is_not_predicted() -> None:
    chosen, other = PersistentTile(rows=256, columns=128), PersistentTile(columns=128)
    sizes = 4096, 16
    assert tile_for_rows(chosen, *sizes, 256, SMS) == other
    assert tile_for_rows(chosen, *sizes, 256, SMS, row_class=256, measured=SIZES) == chosen
    assert tile_for_rows(chosen, *sizes, 144, SMS, row_class=256, measured=SIZES) == PersistentTile(columns=160)


def test_predicted_times_grow_with_the_units_of_a_program() -> None:
    for tile in SIZES:
        times = [tile.predicted_time(128 * number, 16, 2048, SMS) for number in (1, 8, 64, 512)]
        assert times == sorted(times)
        assert tile.predicted_time(4096, 16, 256, SMS) < tile.predicted_time(4096, 56, 256, SMS)


def test_splits_need_concurrent_programs_inputs_and_room() -> None:
    tile = PersistentTile(rows=128, columns=64, splits=4)
    assert tile.can_split(4096, 16, 64, SMS)
    assert tile.programs(4096, 16, 64, SMS) == 128
    assert not tile.can_split(4352, 16, 64, SMS)  # 136 programs
    assert not tile.can_split(4096, 16, 65, SMS)
    assert not tile.can_split(4096, 3, 64, SMS)
    assert not evolve(tile, columns=32, splits=8).can_split(128, 16, 32, SMS)  # fewer sums than warps need
    assert not evolve(tile, columns=256).can_split(4096, 16, 256, SMS)  # too many sums


def for_inputs(tile: PersistentTile, inputs: int) -> PersistentTile:
    """The tile with at most as many splits as there are blocks."""
    return evolve(tile, splits=min(tile.splits, 1 << (-(-inputs // 256)).bit_length() - 1))


def expect_reset(matmul: Any) -> None:
    assert not matmul._stream_k.arrivals.any()
    assert bool((matmul.workspace.polled_sums == EMPTY.value).all())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"),
    [(1, 136, 64, 64), (30, 528, 1160, 128), (64, 1024, 4096, 64), (300, 4096, 4096, 64), (257, 2048, 1152, -1)],
)
def test_products_equal_float64_and_repeat(
    tile: PersistentTile, zeros: bool, rows: int, outputs: int, inputs: int, group: int, hopper: Any, half: Any
) -> None:
    tile = for_inputs(tile, inputs)
    if tile.splits > 1:
        rows = min(rows, tile.columns)  # so that all programs fit
        outputs = min(outputs, 2048)
    matmul: Any = WeightOnlyMatmul(hopper)
    operands = Operands(rows, outputs, inputs, group, hopper, half, zeros=zeros, scale_dtype=half)
    bias = torch.randn(outputs, device=hopper).to(half) if zeros else None
    first = matmul.multiply_by_tile(operands.x, operands.matrix, bias, False, tile)
    check(first, linear(operands, bias))
    for _ in range(10):
        assert torch.equal(matmul.multiply_by_tile(operands.x, operands.matrix, bias, False, tile), first)
    expect_reset(matmul)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(30, 528, 640), (257, 28672, 4096)])
def test_gated_products_equal_float64(
    tile: PersistentTile, rows: int, outputs: int, inputs: int, hopper: Any, half: Any
) -> None:
    tile = for_inputs(tile, inputs)
    if tile.splits > 1:
        rows, outputs = min(rows, tile.columns), min(outputs, 2048)
    matmul: Any = WeightOnlyMatmul(hopper)
    operands = Operands(rows, outputs, inputs, 128, hopper, half, zeros=False)
    bias = torch.randn(outputs, device=hopper).to(half)
    check(matmul.multiply_by_tile(operands.x, operands.matrix, bias, True, tile), gated(operands, bias))
    expect_reset(matmul)


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", [False, True])
def test_products_in_float16_equal_float64(zeros: bool, hopper: Any) -> None:
    matmul: Any = WeightOnlyMatmul(hopper)
    operands = Operands(60, 1040, 2048, 128, hopper, torch.float16, zeros=zeros)
    for tile in (PersistentTile(rows=256, columns=64), PersistentTile(rows=128, columns=64, splits=4)):
        check(matmul.multiply_by_tile(operands.x, operands.matrix, None, False, tile), linear(operands))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, 2.0**-60, 0.0103, 1.0, 65280.0])
def test_weights_are_rounded_once_for_small_and_large_scales(scale: float, hopper: Any) -> None:
    matmul: Any = WeightOnlyMatmul(hopper)
    layout = GroupedLayout.choose(4, 128)
    values = torch.randint(0, 16, (256, 512), dtype=torch.uint8, device=hopper)
    scales = torch.full((4, 256), scale, dtype=torch.bfloat16, device=hopper)
    packed, entries = layout.pack(values, scales, None, 128, torch.bfloat16)
    matrix = PackedMatrix(packed=packed, scales=entries, layout=layout)
    x = torch.eye(512, dtype=torch.bfloat16, device=hopper)[100:132].contiguous()  # picks 32 inputs
    found = matmul.multiply_by_tile(x, matrix, None, False, PersistentTile(rows=128, columns=32))
    assert torch.equal(found, ((values.double() - 8) * scales[0, 0].double()).T[100:132].to(torch.bfloat16))
