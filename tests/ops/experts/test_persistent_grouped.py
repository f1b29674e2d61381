"""The persistent grouped GEMM: its machine code without a GPU, and its products on one with wgmma."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from attrs import evolve

from engine.core.layers.activation import gated_activation
from engine.ops.experts.experts_mlp import ExpertsTile, ExpertsWeights, experts_mlp
from engine.ops.experts.grouped_matmul import GroupedTile, grouped_matmul
from engine.ops.experts.pack import BLOCK_INPUTS, pack_fp4, pack_int4
from engine.ops.experts.persistent_grouped import TILE_OUTPUTS, TILE_ROWS
from engine.ops.experts.quantize import quantize_activations
from engine.ops.experts.sort import PairSorter
from engine.ops.experts.weights import ExpertMatrix, StackedWeight, WeightFormat
from tests.ops.guarded_memory import guarded

TILE = GroupedTile(outputs=TILE_OUTPUTS, block_k=0, warps=0, stages=0, persistent=True)
HIDDEN, INNER, TOP_K = 336, 208, 2
"""Multiples of 16 bytes in 8 bits, and of no tile."""
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have."""
COMPILE = """
import json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from engine.ops.experts.pack import BLOCK_INPUTS, pack_fp4, pack_int4
from engine.ops.experts.persistent_grouped import STAGES, _grouped_kernel as kernel

def stack_bytes(cubin):
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\\d+)", usage)[1])

names = kernel.arg_names

def compile_one(dtype, gated, bias):
    bits = 16 if dtype == "bf16" else 8
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    block = f"tensordesc<{dtype}[128, {1024 // bits}],{layout!r}>"
    constants = {"TOP_K": 8, "GATHER": gated, "SCATTER": not gated, "ACTIVATION": 0 if gated else -1,
                 "SCALES": bits == 8, "X_SCALES": bits == 8, "BIAS": bias, "NUM_STAGES": STAGES, "PDL": True}
    types = dict.fromkeys(names[names.index("order") : names.index("inputs")], "*i32")
    types |= {"out": "*bf16", "x": f"*{dtype}" if gated else block, "weight": block, "bias": "*bf16",
              "x_scales": "*fp32", "scales": "*fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in types if types[name].startswith("*")] + ["inputs", "outputs"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, values, attributes)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4, "launch_pdl": True})
    return {"ptx": made.asm["ptx"], "stack": stack_bytes(made.asm["cubin"]), "shared": made.metadata.shared}

json.dump({name: compile_one(*case) for name, case in json.load(sys.stdin).items()}, sys.stdout)
"""
"""Without a GPU, for Hopper."""
COMPILED = {
    "bf16, gate and up": ("bf16", True, False),
    "bf16, down with bias": ("bf16", False, True),
    "fp8, gate and up": ("fp8e4nv", True, False),
    "int8, down": ("i8", False, False),
}
"""Dtype, whether it is the gate and up projection, whether there is a bias."""
PRODUCTS = {
    "bf16": "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "fp8": "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3",
    "int8": "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8",
}
COUNTS = {
    "edges of tiles and halves": [0, 1, 63, 64, 65, 127, 128, 129, 0, 191, 193, 300],
    "one expert": [0, 1000],
    "fewer items than programs": [3, 2],
    "many items": [700] * 40,
}
"""Rows per expert."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
LIMITS = {"bf16": 4e-3, "fp16": 5e-4, "fp8": 4e-3, "int8": 4e-3}
"""Relative norms of errors: the result is rounded to 16 bits."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(COMPILED),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", COMPILED)
def test_kernel_multiplies_by_wgmma_without_spills(case: str, compiled: Any) -> None:
    made = compiled[case]
    assert PRODUCTS[case.split(",", maxsplit=1)[0]] in made["ptx"]
    assert made["stack"] == 0
    assert made["shared"] <= SHARED


@pytest.mark.parametrize("case", COMPILED)
def test_two_steps_of_each_half_are_in_flight(case: str, compiled: Any) -> None:
    steps = [line.strip() for line in compiled[case]["ptx"].splitlines() if "wgmma." in line]
    commits = [number for number, step in enumerate(steps) if "commit_group" in step]
    assert [steps[number + 1] for number in commits] == ["wgmma.wait_group.sync.aligned 1;"] * 2
    assert sum("wait_group" in step for step in steps) == 4


@pytest.mark.parametrize("case", COMPILED)
def test_kernel_copies_and_stores_16_bytes(case: str, compiled: Any) -> None:
    lines = compiled[case]["ptx"].splitlines()
    gathers = COMPILED[case][1]
    copies = [line for line in lines if "cp.async.c" in line]
    assert len(copies) == (8 if gathers else 0)
    assert all(", 0x10" in copy for copy in copies)
    assert sum("st.global.v4" in line for line in lines) == (16 if gathers else 32)


def routing_of(counts: list[int], device: torch.device) -> torch.Tensor:
    """Experts [tokens, TOP_K] int32 in random order, of each as many as `counts` says, and of none a tenth."""
    experts = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)])
    experts = torch.cat((experts, torch.full((len(experts) // 10 + 1,), -1)))
    experts = torch.cat((experts, torch.full((len(experts) % TOP_K,), -1)))
    return experts[torch.randperm(len(experts))].view(-1, TOP_K).to(torch.int32).to(device)


def random_weight(kind: str, experts: int, outputs: int, inputs: int, device: torch.device) -> StackedWeight:
    values = torch.randn(experts, outputs, inputs, device=device)
    if kind in ("bf16", "fp16"):
        return StackedWeight(values=values.to(DTYPES[kind]), format=WeightFormat(kind="plain"))
    values = (values * (16 if kind == "fp8" else 32)).round().clamp(-127, 127)
    scales = torch.rand(experts, outputs, device=device) + 0.5
    return StackedWeight(values=values.to(DTYPES[kind]), format=WeightFormat(kind="channel", dtype=kind), scales=scales)


def meant(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return values.double() if scales is None else values.double() * scales.double()[..., None]


def compare_with_float64(
    counts: list[int], inputs: int, outputs: int, kind: str, hopper: torch.device, *, gated: bool, biased: bool
) -> None:
    """Compare the products of experts with `counts` rows with those in float64, and with those of a second call."""
    experts = routing_of(counts, hopper)
    pairs = PairSorter(len(counts), TOP_K, hopper)(experts, TILE_ROWS)
    weight = random_weight(kind, len(counts), 2 * outputs if gated else outputs, inputs, hopper)
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    bias = torch.randn(weight.values.shape[:2], device=hopper).to(dtype) if biased else None
    x = (torch.randn(len(experts) if gated else experts.numel(), inputs, device=hopper) * inputs**-0.5).to(dtype)
    x_scales = None
    if weight.scales is not None:
        x, x_scales = quantize_activations(x, weight.values.dtype)
    activation = ("swiglu_oai" if biased else "silu") if gated else None

    def multiply() -> torch.Tensor:
        return grouped_matmul(
            x,
            weight,
            pairs,
            TILE_ROWS,
            TILE,
            dtype=dtype,
            top_k=TOP_K,
            gather=gated,
            scatter=not gated,
            activation=activation,
            bias=bias,
            x_scales=x_scales,
        )

    found = multiply().double()
    assert pairs.claims.tolist() == [0, 0]
    matrices, rows = meant(weight.values, weight.scales), meant(x, x_scales)
    chosen = experts.flatten().tolist()
    order = pairs.order.tolist()[: sum(counts)]
    assert sorted(order) == [pair for pair, expert in enumerate(chosen) if expert >= 0]
    again = multiply().double()
    for expert, count in enumerate(counts):
        mine = [row for row, pair in enumerate(order) if chosen[pair] == expert]
        assert len(mine) == count
        of_pair = [order[row] for row in mine]
        wanted = rows[[pair // TOP_K for pair in of_pair] if gated else mine] @ matrices[expert].T
        if bias is not None:
            wanted += bias[expert].double()
        if activation is not None:
            wanted = gated_activation(activation)(wanted.float()).double()
        got = found[mine if gated else of_pair]
        assert got.shape == wanted.shape
        assert torch.equal(got, again[mine if gated else of_pair])
        assert float((got - wanted).norm()) <= LIMITS[kind] * float(wanted.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("case", COUNTS)
@pytest.mark.parametrize("projection", ["gate and up", "gate and up with bias", "down", "down with bias"])
def test_rows_are_multiplied_by_the_matrix_of_their_expert(
    projection: str, case: str, kind: str, hopper: torch.device
) -> None:
    gated, biased = projection.startswith("gate"), projection.endswith("bias")
    inputs, outputs = (HIDDEN, INNER) if gated else (INNER, HIDDEN)
    compare_with_float64(COUNTS[case], inputs, outputs, kind, hopper, gated=gated, biased=biased)


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [16, 128, 192, 2048])
@pytest.mark.parametrize("gated", [True, False], ids=["gate and up", "down"])
def test_items_of_any_number_of_steps_are_multiplied(inputs: int, hopper: torch.device, *, gated: bool) -> None:
    """Of items with one step, loads are as many items ahead as there are stages."""
    counts = [65, 300, 128, 1, 190] * 9
    compare_with_float64(counts, inputs, 520, "bf16", hopper, gated=gated, biased=False)


@pytest.mark.gpu
def test_kernel_reads_nothing_in_front_of_the_order_of_pairs(hopper: torch.device) -> None:
    """Programs look two items ahead, and so past the last item."""
    experts = (torch.arange(2048 * TOP_K, device=hopper, dtype=torch.int32) % 8).view(-1, TOP_K)
    pairs = PairSorter(8, TOP_K, hopper)(experts, TILE_ROWS)
    weight = random_weight("bf16", 8, 2 * INNER, HIDDEN, hopper)
    x = torch.randn(len(experts), HIDDEN, device=hopper).to(torch.bfloat16)

    def multiply(order: torch.Tensor) -> torch.Tensor:
        return grouped_matmul(
            x,
            weight,
            evolve(pairs, order=order),
            TILE_ROWS,
            TILE,
            dtype=torch.bfloat16,
            top_k=TOP_K,
            gather=True,
            activation="silu",
        )

    assert torch.equal(multiply(guarded(pairs.order)), multiply(pairs.order))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "group"), [("fp4", 32), ("int4", 32), ("int4", 128)])
def test_dequantized_experts_compute_what_4_bit_weights_do(kind: Any, group: int, hopper: torch.device) -> None:
    def random_matrix(outputs: int, inputs: int) -> ExpertMatrix:
        q = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        groups = -(-inputs // group)
        if kind == "fp4":
            return pack_fp4(q, torch.randint(119, 125, (groups, outputs), dtype=torch.uint8))
        scales = (torch.rand(groups, outputs) * 0.02 + 0.01).to(torch.bfloat16)
        return pack_int4(q, scales, None, group, torch.bfloat16)

    def random_matrices(outputs: int, inputs: int) -> StackedWeight:
        packed = [random_matrix(outputs, inputs) for _ in range(4)]
        factors = [one.factor for one in packed if one.factor is not None]
        return StackedWeight(
            values=torch.stack([one.values for one in packed]).to(hopper),
            format=WeightFormat(kind=kind, group=group),
            scales=torch.stack([one.scales for one in packed]).to(hopper),
            factors=torch.stack(factors).to(hopper) if factors else None,
        )

    weights = ExpertsWeights(gate_up=random_matrices(2 * INNER, HIDDEN), down=random_matrices(HIDDEN, INNER))
    x = (torch.randn(300, HIDDEN, device=hopper) * HIDDEN**-0.5).to(torch.bfloat16)
    experts = torch.rand(300, 4, device=hopper).topk(TOP_K).indices.to(torch.int32)
    factors = torch.rand(300, TOP_K, device=hopper)
    by_tiles = GroupedTile(outputs=64, block_k=BLOCK_INPUTS, warps=4, stages=3)
    found = [
        experts_mlp(x, experts, factors, weights, "silu", tile, PairSorter(4, TOP_K, hopper)).double()
        for tile in (
            ExpertsTile(rows=TILE_ROWS, gate_up=by_tiles, down=by_tiles),
            ExpertsTile(rows=TILE_ROWS, gate_up=TILE, down=TILE, dequantized=True),
        )
    ]
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-2
