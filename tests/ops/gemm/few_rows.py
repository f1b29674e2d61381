"""What the tests of the kernels for few rows of x share: tiles, memory of a multiprocessor, machine code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from engine.ops.gemm.few_rows_tile import FewRowsTile

SMS = 132
L1_SHARED = 32 * 2**10
"""Shared memory of a multiprocessor that l1_cache.SHARED_PERCENT leaves."""
COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from engine.ops.gemm.few_rows_tile import FewRowsTile
from engine.ops.gemm.skinny import GATED, PLAIN

def compiled(kernel, scales, tile, gated, half, more):
    tile = FewRowsTile(**tile)
    constants = {
        "TILE": tile.rows, "AHEAD": tile.ahead, "X_AHEAD": tile.x_ahead, "ROW_WARPS": tile.row_warps,
        "SPLITS": tile.splits, "COLUMNS": tile.columns, "SEVERAL": False, "WHOLE_BLOCKS": True,
        "EPILOGUE": (GATED if gated else PLAIN).value, "BIAS": False, "PDL": True,
    }
    constants |= {name: getattr(gl, value) if isinstance(value, str) else value for name, value in more.items()}
    kind = "*fp16" if half else "*bf16"
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {"out": kind, "scales": scales, "bias": kind}
    types |= dict.fromkeys(("x", "packed", "weight", "polled_sums"), "*i32")
    types = {name: value for name, value in types.items() if name in names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in [*types, "weight_rows", "inputs"]}
    source = GluonASTSource(kernel, signature, values, attributes)
    options = {"num_warps": tile.warps, "launch_pdl": True, "maxnreg": tile.registers}
    return triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["sass"]

given = json.load(sys.stdin)
kernel = getattr(importlib.import_module(given["module"]), given["kernel"])
json.dump([compiled(kernel, given["scales"], **case) for case in given["cases"]], sys.stdout)
"""
"""For Hopper, without a GPU and Triton's interpreter."""


def tiles_of(*numbers: tuple[int, ...]) -> list[FewRowsTile]:
    """numbers: rows, warps, ahead, x_ahead, programs, row_warps and perhaps splits and columns of each."""
    names = ("rows", "warps", "ahead", "x_ahead", "programs", "row_warps", "splits", "columns")
    return [FewRowsTile(**dict(zip(names, of_tile, strict=False))) for of_tile in numbers]


def shared_memory_of(tile: FewRowsTile) -> int:
    """Bytes of all programs on a multiprocessor, for their sums and what CUDA reserves."""
    splits = tile.warps // tile.row_warps
    return tile.programs * (splits * tile.rows * tile.columns * 4 + 1024)


def case(tile: FewRowsTile, *, gated: bool = False, half: bool = False, **more: object) -> dict[str, Any]:
    """A variant to compile. half: float16 instead of bfloat16. more: other constexprs; a type is its name in Gluon."""
    return {"tile": attrs.asdict(tile), "gated": gated, "half": half, "more": more}


def compile_cases(module: str, kernel: str, scales: str, cases: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The lines of machine code of each case. scales: the type of the kernel's argument."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given = {"module": module, "kernel": kernel, "scales": scales, "cases": cases}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(given),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [sass.splitlines() for sass in json.loads(done.stdout)]


def products_of(lines: Sequence[str]) -> list[int]:
    """Numbers of the lines with products."""
    return [number for number, line in enumerate(lines) if "HMMA" in line]


def check_loop(lines: Sequence[str]) -> None:
    """Between the products nothing passes through shared memory, no warp waits, and hardly any register is spilled."""
    products = products_of(lines)
    loop = lines[products[0] : products[-1] + 1]
    assert not any(re.search(r"\b(LDS|STS|SHFL|BAR)\b", line) for line in loop)
    assert sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop) < 0.02 * len(loop)
