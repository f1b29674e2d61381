"""Machine code of the weight-only kernel for compute capability 9.0, which takes no GPU to be made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any


def compiled(tile: Any, layout: Any) -> Any:
    """The instructions of a tile for bfloat16, line by line."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.ops.gemm.packed_layout import PackedMatrix
    from engine.ops.gemm.weight_only import matmul_kernel as kernel
    from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul

    multiplier = WeightOnlyMatmul(torch.device("cpu"))
    multiplier._asm = True
    x = torch.empty(1, 4096, dtype=torch.bfloat16)
    scales = torch.empty(1, layout.groups // 2, 1, 2, dtype=torch.bfloat16)
    packed = torch.empty(1, 1, layout.span, dtype=torch.int16)
    matrix = PackedMatrix(packed=packed, scales=scales, layout=layout)
    constants = multiplier._launch(x, x, matrix, None, False, tile, "silu")[2]
    warps = constants.pop("num_warps")
    pointers = dict.fromkeys(("out", "x", "bias"), "*bf16") | dict.fromkeys(("partials", "scales"), "*fp32")
    pointers |= {"packed": "*i16", "arrivals": "*i32", "polled_sums": "*i32"}
    if layout.scale_layout == "groups":
        pointers["scales"] = "*i32"
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    dense = [name for name in names if name not in constants and name != "rows"]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in dense},
    )
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return found.asm["sass"].splitlines()


WGMMA = ("WARPGROUP.DEPBAR", "HGMMA")


def main() -> None:
    """Print what the test looks at, by tile."""
    from engine.ops.gemm.packed_layout import GroupedLayout, W8Layout
    from engine.ops.gemm.weight_only_tiles import TILES

    codes = W8Layout(dtype="float8_e4m3fn")
    counts = []
    for tile, layout in ((TILES[128], GroupedLayout.choose(4, 128)), (TILES[64], codes)):
        lines = compiled(tile, layout)
        waits, multiplications = ([i for i, line in enumerate(lines) if name in line] for name in WGMMA)
        between = lines[multiplications[0] : multiplications[-1]]
        spilled = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in between)
        counts.append([16 // layout.bits, len(waits), len(multiplications), spilled])
    print(json.dumps(counts))


def test_products_of_a_field_are_in_flight_together(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run([sys.executable, "-P", __file__], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    for fields, waits, multiplications, spilled in json.loads(run.stdout):
        assert multiplications >= 2 * fields
        assert waits <= fields
        assert spilled == 0


if __name__ == "__main__":
    main()
