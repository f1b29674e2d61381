"""The kernels of latent caches compiled for GPUs that are not here, at the sizes of DeepSeek-V2: the launch parameters
of each GPU fit its shared memory, and attention uses Hopper's matrix instruction. One process compiles all, since
kernels are defined for the interpreter in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a program may have, by compute capability times 10."""
CASES = [("decode", "bf16", 90), ("prefill", "bf16", 90), ("prefill", "bf16", 100), ("decode", "fp16", 120)]
CASES += [("prefill", "fp16", 80), ("decode", "fp32", 80), ("rotate", "bf16", 90), ("rotate", "fp32", 80)]

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.ops.attention.latent_decode import _decode_kernel, latent_decode_configs
from engine.ops.attention.latent_prefill import _prefill_kernel, latent_prefill_config
from engine.ops.attention.latent_rope import _rotate_and_write_latents_kernel

def compile_rotation(dtype, capability):
    kernel = _rotate_and_write_latents_kernel
    constants = {"HEADS": 16, "LATENT": 512, "HALF": 32, "BLOCK_HEADS": 8, "BLOCK_L": 512, "BLOCK_HALF": 32}
    constants["PDL"] = capability >= 90
    kinds = {"slots": "*i64", "cos": "*fp32", "sin": "*fp32", "eps": "fp32"}
    kinds |= {"token_stride": "i32", "head_stride": "i32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*" + dtype) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 2})

def compile_attention(kind, dtype, capability, shared):
    itemsize = 4 if dtype == "fp32" else 2
    sizes = 576 * itemsize, itemsize, shared + 1024
    if kind == "decode":
        kernel, (_, (_, config)) = _decode_kernel, latent_decode_configs(16, *sizes)
        constants = {"BLOCK_B": 256}
    else:
        kernel, config = _prefill_kernel, latent_prefill_config(*sizes, wgmma=capability == 90)
        constants = {"GROUP_SIZE": 16}
    constants |= {"HEADS": 16, "LATENT": 512, "ROTATED": 64, "BLOCK_SIZE": 16, "BLOCK_M": config.block_m,
                  "BLOCK_N": config.block_n, "BLOCK_L": 512, "BLOCK_R": 64, "PDL": capability >= 90}
    kinds = {"q_ptr": dtype, "cache_ptr": dtype, "out_ptr": dtype, "acc_ptr": "fp32", "stats_ptr": "fp32"}
    signature = {name: "constexpr" if name in constants else "fp32" if name == "scale" else
                 "*" + kinds.get(name, "i32") if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    aligned = [name for name in signature if name.endswith("_ptr") or name in ("q_stride", "out_stride")]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if capability >= 90:
        options["launch_pdl"] = True
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

def compile_kernel(kind, dtype, capability, shared):
    if kind == "rotate":
        made = compile_rotation(dtype, capability)
    else:
        made = compile_attention(kind, dtype, capability, shared)
    return {"shared": made.metadata.shared, "wgmma": "wgmma.mma_async" in made.asm["ptx"]}

json.dump([compile_kernel(*case) for case in json.load(sys.stdin)], sys.stdout)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([(*case, SHARED[case[2]]) for case in CASES]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latent_kernels_fit_each_target_and_use_its_matrix_instruction(
    case: tuple[str, str, int], compiled: Any
) -> None:
    assert compiled[case]["shared"] <= SHARED[case[2]]
    assert compiled[case]["wgmma"] == (case[2] == 90 and case[0] != "rotate")
