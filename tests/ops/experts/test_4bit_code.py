"""Machine code of the grouped GEMM of 4-bit weights for compute capability 9.0, which takes no GPU to be made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

BLOCK_N, WARPS = 128, 4
WEIGHTS = BLOCK_N * 128 // (32 * WARPS)
"""Weights per thread in an iteration."""


def compiled(kind: str, rows: int) -> Any:
    """The instructions of the loop over the inputs, one iteration: 128 inputs of BLOCK_N rows of W."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.ops.experts.grouped_matmul_4bit import _matmul_kernel as kernel

    constants = {
        "TOP_K": 4, "GATHER": True, "SCATTER": False, "ACTIVATION": 0, "FP4": kind == "fp4", "ENTRIES": 1, "BIAS": True,
        "SCALED_SUMS": kind == "int4", "BLOCK_M": rows, "BLOCK_N": BLOCK_N, "STAGES": 3, "ASM": True, "SETTLE": True,
        "PDL": True,
    }  # fmt: skip
    pointers = {"out": "*bf16", "x": "*bf16", "values": "*i16", "scales": "*i32", "factors": "*fp32", "bias": "*bf16"}
    pointers |= dict.fromkeys(("order", "tile_experts", "tile_begins", "tile_ends"), "*i32")
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "inputs", "outputs")},
    )
    options = {"num_warps": WARPS, "launch_pdl": True}
    return loop_of(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["sass"].splitlines())


def loop_of(lines: list[str]) -> list[str]:
    """The longest stretch between a label and a branch back to it."""
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"\s*(LBB\d+):", line))}
    branches = ((i, re.search(r"BRA.*?(LBB\d+)", line)) for i, line in enumerate(lines))
    loops = [lines[labels[found[1]] + 1 : i + 1] for i, found in branches if found and labels[found[1]] < i]
    return max(loops, key=len)


def main() -> None:
    """Print what the test looks at, by kind and rows."""
    cases = [(kind, rows) for kind in ("fp4", "int4") for rows in (8, 16)]
    print(json.dumps([(kind, rows, compiled(kind, rows)) for kind, rows in cases]))


def test_weights_are_unpacked_in_few_instructions_and_stay_in_their_threads(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run([sys.executable, "-P", __file__], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    for kind, rows, loop in json.loads(run.stdout):
        assert len(loop) < (3.2 if kind == "fp4" else 2.7) * WEIGHTS
        assert sum(("HMMA" if rows == 8 else "HGMMA") in line for line in loop) == WEIGHTS // 8
        assert not any(re.search(r"\b(STS|SHFL|LDL|STL|F2F|I2F|I2FP|F2FP)\b", line) for line in loop)
        if rows > 8:
            # The products of a block are in flight together.
            assert sum("WARPGROUP.DEPBAR" in line for line in loop) == 1
            assert sum("LDSM" in line for line in loop) == WEIGHTS // 32


if __name__ == "__main__":
    main()
