from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from attrs import evolve

from engine.ops.activation.act_and_mul import SILU
from engine.ops.activation.quantize_rows import VALUE_ROW_MULTIPLE
from engine.ops.gemm.scaled_matmul import W8A8Tile, matmul
from engine.ops.gemm.skinny_launch import Workspace
from engine.plugins.quant.w8a8_tiles import PERSISTENT_SHAPES

from .w8a8 import Operands, before_others, check_close

SHAPES = sorted({shape for of_class in PERSISTENT_SHAPES.values() for shape in of_class})
LIMIT = 2**-6
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from engine.ops.gemm import MODULE

def block(kind, bits, rows, columns):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    return f"tensordesc<{kind}[{rows}, {columns}],{layout!r}>"

rows, outputs, warps = ROWS, OUTPUTS, WARPS
kernel = MODULE.NAME
constants = CONSTANTS
types = {
    "out": block("bf16", 16, rows, 64), "x": block("i8", 8, rows, 128), "weight": block("i8", 8, outputs, 128),
    "x_scale": "*fp32", "scale": "*fp32", "bias": "*bf16", "partials": "*i32", "arrivals": "*i32",
}
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
options = {"num_warps": warps, "launch_pdl": True}
print(triton.compile(GluonASTSource(kernel, signature, values), GPUTarget("cuda", 90, 32), options).asm["ptx"])
"""
"""Without a GPU, int8 for Hopper."""


@pytest.mark.parametrize(
    ("module", "name", "rows", "outputs", "warps", "constants"),
    [
        ("persistent_matmul", "_matmul_kernel", 128, 128, 8, {"STAGES": 5, "SPLITS": 2, "BIAS": True, "PDL": True}),
        (
            "specialized_matmul",
            "_specialized_kernel",
            64,
            256,
            4,
            {"STAGES": 4, "BIAS": True, "ACTIVATION": None, "PDL": True},
        ),
        (
            "specialized_matmul",
            "_specialized_kernel",
            64,
            128,
            4,
            {"STAGES": 4, "BIAS": True, "ACTIVATION": SILU.value, "PDL": True},
        ),
    ],
)
def test_two_int8_steps_are_in_flight(
    module: str, name: str, rows: int, outputs: int, warps: int, constants: dict[str, object]
) -> None:
    values = {"ROWS": rows, "OUTPUTS": outputs, "WARPS": warps, "MODULE": module, "NAME": name, "CONSTANTS": constants}
    script = re.sub(r"\b(ROWS|OUTPUTS|WARPS|MODULE|NAME|CONSTANTS)\b", lambda match: str(values[match[0]]), COMPILE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps = [line.strip() for line in done.stdout.splitlines() if "wgmma." in line]
    products = [number for number, line in enumerate(steps) if "mma_async" in line]
    assert all("s32.s8.s8" in steps[number] for number in products)
    assert steps[products[-1] + 1 :][:2] == ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 1;"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "weight_rows", "inputs"),
    [(64, 1024, 256), (81, 4744, 5120), (257, 1032, 4112), (1, 264, 16), (3001, 6152, 144), (2048, 6144, 4096)],
)
def test_products_equal_float64_and_repeat(
    kind: str, splits: int, rows: int, weight_rows: int, inputs: int, hopper: torch.device, half: torch.dtype
) -> None:
    workspace = Workspace(hopper)
    operands = Operands(kind, rows, weight_rows, inputs, hopper, biased=rows == 257, half=half)
    codes = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, operands.bias)
    for tile_rows, outputs, warps, stages, block_k in SHAPES:
        whole = W8A8Tile(rows=tile_rows, outputs=outputs, warps=warps, stages=stages, block_k=block_k, persistent=True)
        tile = evolve(whole, splits=splits)
        if tile.fits(rows, weight_rows):
            first = matmul(*codes, half, tile, workspace)
            check_close(first, operands.exact(codes=True), LIMIT)
            assert not workspace.arrivals.any()
            for _ in range(10):
                assert torch.equal(matmul(*codes, half, tile, workspace), first)
            assert torch.equal(
                matmul(before_others(codes[0], VALUE_ROW_MULTIPLE), *codes[1:], half, tile, workspace), first
            )
