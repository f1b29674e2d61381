"""The float8 prefill kernel, compared with attention in float64 of queries and weights rounded in the same way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch

from engine.core.attention import AttentionSpec
from engine.testing.attention_cases import dense_attention

from .prefill import check, float8_attention

COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from engine.ops.attention.persistent_float8 import BLOCK_M, STAGES, _prefill_kernel as kernel

def block(rows, columns):
    return f"tensordesc<fp8e4nv[{rows}, {columns}],{gl.NVMMASharedLayout(columns, 8, rank=2)!r}>"

dim = int(sys.argv[1])
constants = {
    "KV_HEADS": 8, "GROUP_SIZE": 4, "WINDOWED": dim == 64, "SOFTCAP": dim == 64, "SINKS": dim == 64,
    "BLOCK_M": BLOCK_M, "STAGES": STAGES, "PDL": True,
}
types = dict.fromkeys(("q", "out"), "*bf16") | {"tiles": "*i32", "keys": block(128, dim), "values": block(dim, 128)}
types |= dict.fromkeys(("scale", "softcap", "value_scale"), "fp32") | {"sinks": "*fp32"}
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
aligned = [number for number, name in enumerate(kernel.arg_names) if types.get(name, "").startswith("*")]
aligned += [kernel.arg_names.index(name) for name in ("q_stride", "out_stride")]
attributes = {(number,): [["tt.divisibility", 16]] for number in aligned}
source = GluonASTSource(kernel, signature, values, attributes)
made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4, "launch_pdl": True})
print(json.dumps({"ptx": made.asm["ptx"], "shared": made.metadata.shared}))
"""
"""Compiles the kernel for Hopper without a GPU."""


def compiled(dim: int) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(dim)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kernel_has_both_products_of_a_step_in_flight_and_moves_no_weights_between_threads() -> None:
    ptx = compiled(128)["ptx"]
    steps = re.findall(r"wgmma\.\S+", ptx)
    products = [step for step in steps if "mma_async" in step]
    assert products
    assert all("f32.e4m3.e4m3" in product for product in products)
    waits = [number for number, step in enumerate(steps) if "wait_group" in step]
    commits = [sum("commit_group" in step for step in steps[begin:end]) for begin, end in pairwise([0, *waits])]
    # Per half: scores of the first step, values of the last, and both products in steps without and with a mask, of
    # which the values are waited for first.
    assert sorted(commits) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    # Shuffles reduce rows only: in each softmax (3 per half) the maximum and the sum of two rows per thread among 4
    # threads; and the magnitudes of queries, 16 rows per thread, among 16 threads. Weights that changed threads would
    # add more. That they stay in their registers is asserted by the kernel (assert_trivial).
    assert ptx.count("shfl.sync.bfly") == 2 * 3 * 2 * (2 * 2) + 16 * 4


@pytest.mark.parametrize("dim", [64, 128])
def test_kernel_fits_into_shared_memory(dim: int) -> None:
    assert compiled(dim)["shared"] <= 227 * 1024


@pytest.mark.parametrize("window", [None, 100])
def test_reference_is_near_attention_without_rounding(window: int | None) -> None:
    spec = AttentionSpec(
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        scale=0.125,
        dtype="float32",
        kv_dtype="float32",
        block_size=16,
        max_len=300,
        sliding_windows=(window,),
        softcap=2.0,
    )
    torch.manual_seed(0)
    q, k, v = (torch.randn(size, heads, 64) for size, heads in ((9, 4), (300, 2), (300, 2)))
    sinks = torch.linspace(-2.0, 4.0, 4)
    wanted = dense_attention(q, k, v, spec, window, sinks)
    error = float((float8_attention(q, k, v, spec, window, sinks) - wanted).norm() / wanted.norm())
    assert 1e-3 < error < 4e-2  # rounded, and only rounded


# Edges of blocks of 128 keys, of tiles of 128 rows and their halves, and more tiles than multiprocessors.
EDGES = ((0, 1), (0, 64), (0, 65), (127, 1), (127, 130), (128, 33), (300, 900))
FLOAT8: Any = {"kv_dtype": torch.float8_e4m3fn, "float8": True, "dtype": torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("page", "dtype"), [(8, torch.float16), (16, torch.bfloat16), (128, torch.bfloat16)])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (2, 128), (4, 128), (7, 64), (128, 128)])
def test_kernel_is_correct_at_tile_edges(group: int, dim: int, page: int, dtype: torch.dtype) -> None:
    check(EDGES, heads=(2 * group, 2), dim=dim, block_size=page, **FLOAT8 | {"dtype": dtype})


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 100, 128, 300, 1000])
def test_kernel_handles_windows_and_soft_caps(window: int | None, softcap: float | None) -> None:
    check(EDGES, heads=(8, 2), dim=128, window=window, softcap=softcap, value_scale=0.37, **FLOAT8)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("group", "dim"), [(3, 128), (8, 64)])
def test_kernel_adds_sinks(group: int, dim: int, window: int | None) -> None:
    check(EDGES, heads=(2 * group, 2), dim=dim, window=window, has_sinks=True, **FLOAT8)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("sharpness", [0.0, 4.0])
def test_kernel_is_correct_for_zero_and_for_sharp_queries(sharpness: float) -> None:
    check(((0, 500), (900, 100)), heads=(8, 2), dim=128, sharpness=sharpness, **FLOAT8)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_kernel_is_correct_in_many_turns_repeatedly() -> None:
    for _ in range(2):
        check(((0, 1500), (700, 1000), (5, 1)), heads=(16, 8), dim=128, **FLOAT8)
