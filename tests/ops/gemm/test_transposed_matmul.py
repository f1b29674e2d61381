"""W x^T of quantized x and W: machine code, how programs share tiles, and results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from engine.core.layers import gated_activation
from engine.ops.activation.act_and_mul import ACTIVATIONS, act_and_mul
from engine.ops.activation.quantize_rows import VALUE_ROW_MULTIPLE
from engine.ops.gemm import transposed_launch
from engine.ops.gemm.scaled_matmul import W8A8Tile, matmul
from engine.ops.gemm.scaled_operands import ScaledOperands
from engine.ops.gemm.skinny_launch import MAX_PARTIAL_SUMS, Workspace
from engine.ops.gemm.transposed_launch import PART, PIECE, TransposedTile, shared_tiles, transposed_matmul
from engine.plugins.quant.w8a8_tiles import TRANSPOSED_ROWS, TRANSPOSED_TILES

from .w8a8 import Operands, before_others, check_close

SMS = 132
SHARED = 227 * 1024
LIMIT = 2**-6
TILES = [
    *(tile for tiles in TRANSPOSED_TILES.values() for tile in tiles),
    TransposedTile(weight_rows=64, rest=128, stages=5),
    TransposedTile(weight_rows=128, rest=32, stages=5),
]
PRESENT = W8A8Tile(rows=64, outputs=64, warps=4, stages=6, block_k=256, persistent=True)
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from engine.ops.gemm.transposed_launch import PIECE, TransposedTile
from engine.ops.gemm.transposed_matmul import matmul_kernel

def block(kind, bits, shape):
    width = min(shape[-1] * bits // 8, 128)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=len(shape))
    return f"tensordesc<{kind}{shape},{layout!r}>"

def compiled(weight_rows, activation):
    tile = TransposedTile(weight_rows=weight_rows, rest=64, stages=4)
    gated = activation is not None
    types = {
        "out": block("bf16", 16, [PIECE, weight_rows // 2 if gated else weight_rows]),
        "x": block("i8", 8, [128, 128]), "rest": block("i8", 8, [64, 128]),
        "weight": block("i8", 8, [weight_rows // 16, 2, 8, 128] if gated else [weight_rows, 128]),
        "x_scale": "*fp32", "scale": "*fp32", "bias": "*bf16", "partials": "*i32", "arrivals": "*i32",
    }
    constants = {"BLOCK_W": weight_rows, "STAGES": tile.stages, "BIAS": True, "ACTIVATION": activation, "PDL": True}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in matmul_kernel.arg_names}
    values = {(matmul_kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": tile.warps, "launch_pdl": True}
    made = triton.compile(GluonASTSource(matmul_kernel, signature, values), GPUTarget("cuda", 90, 32), options)
    return {"ptx": made.asm["ptx"], "shared": made.metadata.shared, "estimate": tile.shared_memory}

json.dump([compiled(*case) for case in json.load(sys.stdin)], sys.stdout)
"""
"""Without a GPU, int8 for Hopper."""
CASES = [(128, None), (64, None), (128, 0), (64, 0)]
"""Rows of W, and activation."""


def test_products_of_one_step_are_in_flight_while_the_next_begins() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(CASES),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for made in json.loads(done.stdout):
        steps = [line.strip() for line in made["ptx"].splitlines() if "wgmma." in line]
        products = [number for number, line in enumerate(steps) if "mma_async" in line]
        assert {steps[number].split(".")[4] for number in products} == {"m64n128k32", "m64n64k32"}
        assert all("s32.s8.s8" in steps[number] for number in products)
        assert steps[products[-1] + 1 :][:2] == ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 2;"]
        assert made["shared"] <= made["estimate"] + 1024


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_fit_the_shared_memory(tile: TransposedTile) -> None:
    assert tile.shared_memory + 1024 <= SHARED
    assert tile.rest % PIECE == PART % PIECE == 0


def test_tiles_of_a_row_class_have_all_its_rows() -> None:
    assert all(tile.rows == rows for rows, tiles in TRANSPOSED_TILES.items() for tile in tiles)
    assert TRANSPOSED_ROWS[-1] == max(TRANSPOSED_TILES)


@pytest.mark.parametrize("outputs", [64, 2048, 4096, 5120, 6144, 7808, 16896, 28672, 34816, 51200])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_programs_run_concurrently_and_have_room_for_their_sums(tile: TransposedTile, outputs: int) -> None:
    inputs = 4096
    programs, tiles = tile.programs(outputs, inputs, SMS), -(-outputs // tile.weight_rows)
    assert 1 <= programs <= min(SMS, tiles * inputs // 128)
    assert programs * tile.weight_rows * tile.rows <= MAX_PARTIAL_SUMS
    shared = shared_tiles(tiles, programs)
    assert shared <= tiles
    assert (tiles - shared) % programs == 0


def test_few_tiles_that_are_left_are_shared_with_those_of_a_wave() -> None:
    """Else many programs would share each of them."""
    assert shared_tiles(400, 132) == 4 + 132
    assert shared_tiles(224, 132) == 92
    assert shared_tiles(264, 132) == 0
    assert shared_tiles(40, 120) == 40


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("rows", "weight_rows", "inputs"),
    [
        (129, 1032, 256),
        (150, 4744, 5120),
        (192, 6152, 144),
        (160, 2048, 6144),
        (192, 28672, 512),
        (256, 51200, 256),
        (1, 264, 16),
    ],
)
def test_products_equal_float64_and_repeat(
    kind: str, rows: int, weight_rows: int, inputs: int, hopper: torch.device, half: torch.dtype
) -> None:
    workspace = Workspace(hopper)
    operands = Operands(kind, rows, weight_rows, inputs, hopper, biased=rows == 150, half=half)
    codes = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, operands.bias)
    present = matmul(*codes, half, PRESENT, workspace)
    for tile in TILES:
        if rows > tile.rows:
            continue
        first = torch.full((rows, weight_rows), torch.nan, dtype=half, device=hopper)
        transposed_launch.launch(first, ScaledOperands(*codes), tile, workspace)
        check_close(first, operands.exact(codes=True), LIMIT)
        assert kind == "fp8" or torch.equal(first, present)
        others = before_others(codes[0], VALUE_ROW_MULTIPLE)
        for _ in range(10):
            assert torch.equal(transposed_matmul(*codes, half, tile, workspace), first)
            assert torch.equal(transposed_matmul(others, *codes[1:], half, tile, workspace), first)
        assert not workspace.arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "size", "inputs"), [(129, 520, 4224), (192, 3080, 256), (150, 14336, 512)])
def test_gated_products_equal_separate_kernels_in_int8_to_the_last_bit(
    kind: str, activation: Any, rows: int, size: int, inputs: int, hopper: torch.device, half: torch.dtype
) -> None:
    """In fp8 up to the order of sums: a row of W is in another tile, of which programs have other shares."""
    workspace = Workspace(hopper)
    operands = Operands(kind, rows, 2 * size, inputs, hopper, biased=rows == 129, half=half)
    codes = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, operands.bias)
    for tile in TILES:
        if rows > tile.rows:
            continue
        found = torch.full((rows, size), torch.nan, dtype=half, device=hopper)
        transposed_launch.launch(found, ScaledOperands(*codes), tile, workspace, activation=activation)
        check_close(found, gated_activation(activation)(operands.exact(codes=True)), LIMIT)
        if kind == "int8":
            separate = act_and_mul(transposed_matmul(*codes, half, tile, workspace), activation)
            assert torch.equal(found, separate)
