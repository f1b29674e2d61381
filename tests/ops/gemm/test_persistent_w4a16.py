"""The persistent W4A16 kernel: its machine code, the choice of its tiles, how programs share them, and its results."""

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

from engine.ops.gemm.packed_layout import GroupedLayout, W8Layout
from engine.ops.gemm.weight_only_candidates import (
    MEASURED_CLASSES,
    PERSISTENT_CLASSES,
    candidates,
)
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import (
    PersistentTile,
    WeightOnlyShape,
    default_tile,
)

from .test_weight_only import HOPPER, LLAMA, Operands, check, gated, linear

SMS = 132
TILES = (PersistentTile(columns=128), PersistentTile(columns=256))
COMPILE = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from engine.ops.gemm.persistent_w4a16 import matmul_kernel as kernel
from engine.ops.gemm.skinny import GATED, PLAIN
from engine.ops.gemm.weight_only_tiles import PersistentTile

def block(kind, *shape):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return f"tensordesc<{kind}[{', '.join(map(str, shape))}],{layout!r}>"

def compiled(columns, gated, zeros):
    tile = PersistentTile(columns=columns)
    constants = {
        "BLOCK_N": tile.rows, "STEPS": tile.steps, "STAGES": tile.stages, "GROUPS": 2, "SCALE_DTYPE": gl.float16,
        "POWER": 128, "ZERO_POINTS": zeros, "EPILOGUE": (GATED if gated else PLAIN).value, "BIAS": True, "PDL": True,
    }
    words = block("i16", 1, tile.rows // 16, 2, 8, 64) if gated else block("i16", tile.rows, 64)
    types = {
        "out": block("bf16", columns, tile.rows // 2 if gated else tile.rows), "x": block("bf16", columns, 64),
        "packed": words, "scales": "*i32", "bias": "*bf16", "partials": "*fp32", "arrivals": "*i32",
    }
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in types if types[name].startswith("*")] + ["weight_rows"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, values, attributes)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": tile.warps, "launch_pdl": True})
    return {"sass": made.asm["sass"], "shared": made.metadata.shared, "steps": tile.steps}

print(json.dumps([compiled(*case) for case in ((128, False, False), (256, True, True))]))
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
        assert len(products) == 16  # of 16 inputs each
        waits = [line for line in lines[products[0] :] if "WARPGROUP.DEPBAR" in line]
        assert len(waits) == made["steps"] + 1  # one per step, and one at the end of a tile
        assert all(f"0x{4 // made['steps']}" in line for line in waits[:-1])
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in loop)


def shape_of(outputs: int, inputs: int, group: int = 128) -> WeightOnlyShape:
    return WeightOnlyShape(gated=False, weight_rows=outputs, inputs=inputs, layout=GroupedLayout.choose(4, group))


def test_persistent_tiles_serve_many_rows_of_gpus_with_wgmma() -> None:
    shape = shape_of(4096, 4096)
    found = {rows: default_tile(shape, rows, SMS, HOPPER, wgmma=True) for rows in (64, 65, 128, 129, 512, 513)}
    assert {rows: tile for rows, tile in found.items() if isinstance(tile, PersistentTile)} == {
        65: TILES[0],
        128: TILES[0],
        129: TILES[1],
        512: TILES[1],
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
        assert any(isinstance(tile, PersistentTile) for tile in found) == (rows > 64)
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


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_as_many_programs_as_share_the_units_evenly(tile: PersistentTile) -> None:
    assert tile.programs(28672, 16, 2048, SMS) == SMS
    assert tile.programs(4096, 16, tile.columns, SMS) == 128  # 32 tiles of 16 units, 4 units each
    assert tile.programs(128, 3, 1, SMS) == 3
    assert tile.rows * tile.columns <= PersistentTile.max_sums


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"),
    [(1, 136, 64, 64), (100, 528, 648, 128), (300, 4096, 4096, 64), (257, 6144, 4096, 128), (2048, 2048, 1152, -1)],
)
def test_products_equal_float64_and_repeat(
    tile: PersistentTile, zeros: bool, rows: int, outputs: int, inputs: int, group: int, hopper: Any, half: Any
) -> None:
    matmul: Any = WeightOnlyMatmul(hopper)
    operands = Operands(rows, outputs, inputs, group, hopper, half, zeros=zeros, scale_dtype=half)
    bias = torch.randn(outputs, device=hopper).to(half) if zeros else None
    first = matmul.multiply_by_tile(operands.x, operands.matrix, bias, False, tile)
    check(first, linear(operands, bias))
    assert not matmul._stream_k.arrivals.any()
    for _ in range(10):
        assert torch.equal(matmul.multiply_by_tile(operands.x, operands.matrix, bias, False, tile), first)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(100, 528, 640), (257, 28672, 4096)])
def test_gated_products_equal_float64(
    tile: PersistentTile, rows: int, outputs: int, inputs: int, hopper: Any, half: Any
) -> None:
    matmul: Any = WeightOnlyMatmul(hopper)
    operands = Operands(rows, outputs, inputs, 128, hopper, half, zeros=False)
    bias = torch.randn(outputs, device=hopper).to(half)
    check(matmul.multiply_by_tile(operands.x, operands.matrix, bias, True, tile), gated(operands, bias))
    assert not matmul._stream_k.arrivals.any()
