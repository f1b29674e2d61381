"""The W8A8 kernels compiled for GPUs that are not here: which instructions they are made of, and how much memory they
need. One process compiles all, since kernels are defined for the interpreter in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a program may have, by compute capability times 10."""

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.ops.gemm.scaled_matmul import W8A8Tile, _matmul_kernel

def compile_tile(capability, kind, tile, scale_rows, tma):
    quantized = {"fp8": "fp8e4nv", "int8": "i8"}[kind]
    rows, outputs = ((f"tensordesc<{quantized}[{size}, 128]>" if tma else f"*{quantized}")
                     for size in (tile.rows, tile.outputs))
    pointers = {"out": "*bf16", "x": rows, "weight": outputs, "x_scale": "*fp32", "scale": "*fp32", "bias": "*bf16",
                "partials": "*i32" if kind == "int8" else "*fp32", "arrivals": "*i32"}
    numbers = dict.fromkeys(("rows", "outputs", "inputs", "x_scale_stride"), "i32")
    constants = {"BLOCK_M": tile.rows, "BLOCK_N": tile.outputs, "BLOCK_K": tile.block_k, "STAGES": tile.stages,
                 "SPLITS": tile.splits, "INTEGER": kind == "int8", "SCALE_ROWS": scale_rows, "TMA": tma, "WHOLE": True,
                 "BIAS": False, "PDL": capability >= 90}
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    aligned = [name for name, kind in pointers.items() if kind.startswith("*")] + ["outputs", "inputs"]
    attributes = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=_matmul_kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tile.warps, **({"launch_pdl": True} if capability >= 90 else {})}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"ptx": made.asm["ptx"], "shared": made.metadata.shared, "binary": len(made.asm["cubin"])}

cases = json.load(sys.stdin)
json.dump({name: compile_tile(case[0], case[1], W8A8Tile(**case[2]), case[3], case[4]) for name, case in cases.items()},
          sys.stdout)
"""

SMALL = {"rows": 64, "outputs": 64, "warps": 4, "stages": 3}
SQUARE = {"rows": 128, "outputs": 128, "warps": 8, "stages": 3}
CASES: dict[str, Any] = {
    "int8 on Ampere": (80, "int8", SMALL, 0, False),
    "float8 on Ada": (89, "fp8", SQUARE, 0, False),
    "blocks on Ada": (89, "fp8", SMALL, 128, False),
    "blocks on Hopper": (90, "fp8", SQUARE, 128, True),
    "blocks on B200": (100, "fp8", SQUARE, 128, True),
    "float8 on RTX 50": (120, "fp8", SQUARE, 0, True),
}
"""Capability times 10, kind, tile, outputs per scale of a block, and whether tiles are loaded by TMA."""
INSTRUCTIONS = {
    "int8 on Ampere": ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", "cp.async.cg"),
    "float8 on Ada": ("e4m3.e4m3.f32", "cp.async.cg"),
    "blocks on Ada": ("e4m3.e4m3.f32", "cp.async.cg"),
    "blocks on Hopper": ("wgmma.mma_async", "cp.async.bulk.tensor"),
    "blocks on B200": ("tcgen05.mma", "cp.async.bulk.tensor"),
    "float8 on RTX 50": ("e4m3.e4m3.f32", "cp.async.bulk.tensor"),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(CASES),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_kernels_use_the_tensor_cores_of_each_target(case: str, compiled: Any) -> None:
    made = compiled[case]
    for instruction in INSTRUCTIONS[case]:
        assert instruction in made["ptx"]
    assert made["binary"] > 0
    assert made["shared"] <= SHARED[CASES[case][0]]
