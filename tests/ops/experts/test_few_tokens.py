"""The kernels for the experts of few tokens: machine code without a GPU, choice, and results next to float64."""

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

from engine.core.layers.activation import gated_activation
from engine.ops.experts.few_tokens_launch import (
    MAX_TOKENS,
    FewTokensTile,
    FewTokensTiles,
    experts_of_few_tokens,
    few_tokens_tiles,
    suits_few_tokens,
)
from engine.ops.experts.pack import pack_fp4, pack_int4
from engine.ops.experts.tiles import ExpertsShape
from engine.ops.experts.weights import ExpertMatrix, StackedWeight, WeightFormat

EXPERTS, TOP_K, HIDDEN, INNER = 6, 3, 336, 208
SMS = 132
FORMATS = {
    "plain": WeightFormat(kind="plain"),
    "float8": WeightFormat(kind="channel", dtype="float8_e4m3fn"),
    "float8 blocks": WeightFormat(kind="block", dtype="float8_e4m3fn", scale_rows=128),
    "int4": WeightFormat(kind="int4", group=128),
    "fp4": WeightFormat(kind="fp4", group=32),
}
ROUTINGS = {
    "one token": [[4, 1, 2]],
    "one token, experts of other ranks": [[-1, 1, -1]],
    "no experts here": [[-1, -1, -1], [-1, -1, -1]],
    "an expert for all": [[2, 0, 1], [2, 3, 4], [5, 2, 0]],
    "most tokens": [[0, 1, 2], [1, 2, 3], [2, 3, 4], [5, 4, 3], [-1, 0, 5], [1, 0, 2], [3, 5, -1], [4, 2, 1]],
}
COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from engine.ops.experts import few_tokens
from engine.ops.experts.few_tokens_weights import KINDS

def compiled(kernel, kind, scale_rows, ahead, warps, registers):
    kernel = getattr(few_tokens, kernel)
    names = kernel.arg_names
    constants = {"TOP_K": 8, "KIND": KINDS[kind].value, "SCALE_ROWS": scale_rows, "ACTIVATION": 0,
                 "BIAS": False, "ONE": False, "TILE": 16, "AHEAD": ahead, "K_WARPS": 1, "PDL": True}
    constants = {name: value for name, value in constants.items() if name in names}
    types = {"out": "*bf16", "bias": "*bf16", "matrix_factors": "*fp32", "factors": "*fp32",
             "scales": "*i32" if "4" in kind else "*fp32"}
    types |= dict.fromkeys(("x", "values", "experts"), "*i32")
    types = {name: value for name, value in types.items() if name in names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [*types, "outputs", "inputs", "row_words"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, values, attributes)
    options = {"num_warps": warps, "launch_pdl": True, "maxnreg": registers}
    return triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["sass"].splitlines()

json.dump([compiled(**case) for case in json.load(sys.stdin)], sys.stdout)
"""


def shape_of(form: WeightFormat, **change: Any) -> ExpertsShape:
    shape = ExpertsShape(
        num_experts=128,
        rank_experts=128,
        top_k=8,
        hidden=2048,
        intermediate=768,
        format=form,
        activation="silu",
        dtype="bfloat16",
        wgmma=True,
    )
    return evolve(shape, **change)


def test_weights_go_from_memory_to_products_in_registers() -> None:
    kinds = [("plain", 0), ("float8", 0), ("float8", 128), ("fp4", 0), ("int4", 0)]
    cases = [
        {
            "kernel": kernel,
            "kind": kind,
            "scale_rows": scale_rows,
            "ahead": 1 if kind in ("fp4", "int4") else 2,
            "warps": 4,
            "registers": 128,
        }
        for kind, scale_rows in kinds
        for kernel in ("experts_gate_up_kernel", "experts_down_kernel")
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(
        command, input=json.dumps(cases), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for case, lines in zip(cases, json.loads(done.stdout), strict=True):
        products = [number for number, line in enumerate(lines) if "HMMA" in line]
        of_block = {"plain": 4, "float8": 8, "fp4": 16, "int4": 16}[case["kind"]]
        assert len(products) == of_block * case["ahead"], case
        loop = lines[products[0] : products[-1] + 1]
        assert not any(re.search(r"\b(LDS|STS|SHFL|BAR)\b", line) for line in loop), case
        assert sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop) < 0.02 * len(loop), case


@pytest.mark.parametrize(
    ("name", "change", "most"),
    [
        ("plain", {}, MAX_TOKENS),
        ("plain", {"wgmma": False}, 0),
        ("plain", {"dtype": "float16"}, 0),
        ("plain", {"intermediate": 764}, 0),
        ("plain", {"rank_experts": 64}, 0),
        ("float8", {}, 2),
        ("float8", {"quantized": "float8_e4m3fn"}, 2),
        ("float8", {"quantized": "float8_e4m3fn", "intermediate": 760}, 0),
        ("float8", {"format": WeightFormat(kind="channel", dtype="int8")}, 0),
        ("float8 blocks", {"quantized": "float8_e4m3fn"}, MAX_TOKENS),
        ("float8 blocks", {"format": WeightFormat(kind="block", dtype="float8_e4m3fn")}, 0),
        ("int4", {}, 1),
        ("int4", {"format": WeightFormat(kind="int4", group=32)}, 0),
        ("fp4", {"top_k": 4}, 1),
        ("fp4", {"top_k": 3}, 0),
    ],
)
def test_kernels_serve_few_tokens_of_formats_that_ran(name: str, change: dict[str, Any], most: int) -> None:
    shape = evolve(shape_of(FORMATS[name]), **change)
    assert [tokens for tokens in range(MAX_TOKENS + 2) if suits_few_tokens(shape, tokens)] == list(range(1, most + 1))


def test_a_token_has_an_expert_for_each_group_of_warps() -> None:
    shape = shape_of(FORMATS["plain"], top_k=2)
    assert [tokens for tokens in range(MAX_TOKENS + 1) if suits_few_tokens(shape, tokens)] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_tiles_divide_warps_and_leave_registers(form: WeightFormat) -> None:
    for tokens in range(1, MAX_TOKENS + 1):
        tiles = few_tokens_tiles(shape_of(form), tokens, SMS)
        assert tiles.down.warps % tiles.down.k_warps == 0
        for tile in (tiles.gate_up, tiles.down):
            assert tile.rows % 16 == 0
            assert tile.registers >= 64


def random_matrix(
    form: WeightFormat, outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[ExpertMatrix, torch.Tensor]:
    """A random matrix, and what it means, in float64."""
    if form.kind == "plain":
        values = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
        return ExpertMatrix(values=values, scales=torch.empty(0)), values.double()
    if form.kind == "fp4":
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        bits = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        scales = torch.randint(121, 125, (-(-inputs // 32), outputs), dtype=torch.uint8)
        spread = torch.exp2(scales.double() - 127).repeat_interleave(32, 0)[:inputs].T
        return pack_fp4(bits, scales), numbers[(bits & 7).long()] * (1 - 2 * (bits >> 3).double()) * spread
    if form.kind == "int4":
        bits = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        groups = -(-inputs // form.group)
        scales = (torch.rand(groups, outputs) * 0.02 + 0.01).to(dtype)
        zeros = torch.randint(0, 16, (groups, outputs), dtype=torch.uint8)
        spread = [one.double().repeat_interleave(form.group, 0)[:inputs].T for one in (scales, zeros)]
        meant = (bits.double() - spread[1]) * spread[0]
        return pack_int4(bits, scales, zeros, form.group, dtype), meant.to(dtype).double()
    values = (torch.randn(outputs, inputs) * 8).to(torch.float8_e4m3fn)
    unit = 0.005
    if form.kind == "channel":
        scales = torch.rand(outputs) * unit + unit
        return ExpertMatrix(values=values, scales=scales), values.double() * scales.double()[:, None]
    scales = torch.rand(-(-outputs // form.scale_rows), -(-inputs // 128)) * unit + unit
    spread = scales.double().repeat_interleave(form.scale_rows, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    return ExpertMatrix(values=values, scales=scales), values.double() * spread


def stacked(
    form: WeightFormat, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[StackedWeight, torch.Tensor]:
    made = [random_matrix(form, outputs, inputs, dtype) for _ in range(EXPERTS)]
    weight = StackedWeight(
        values=torch.stack([one.values for one, _ in made]).to(device),
        format=form,
        scales=None if form.kind == "plain" else torch.stack([one.scales for one, _ in made]).to(device),
        factors=torch.stack([one.factor for one, _ in made if one.factor is not None]).to(device)
        if form.kind == "fp4"
        else None,
    )
    return weight, torch.stack([meant for _, meant in made])


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_sums_of_experts_are_those_of_float64(
    form: WeightFormat, routing: str, activation: Any, hopper: torch.device
) -> None:
    """With SiLU by the tiles that are used, otherwise by others."""
    device, dtype = hopper, torch.bfloat16
    torch.manual_seed(1)
    experts = torch.tensor(ROUTINGS[routing], dtype=torch.int32)
    tokens = len(experts)
    factors = torch.rand(tokens, TOP_K) + 0.5
    up, meant_up = stacked(form, 2 * INNER, HIDDEN, dtype, device)
    down, meant_down = stacked(form, HIDDEN, INNER, dtype, device)
    biases = torch.randn(EXPERTS, 2 * INNER).to(dtype), torch.randn(EXPERTS, HIDDEN).to(dtype)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    activate = gated_activation(activation)
    wanted = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for token, slot in ((t, s) for t in range(tokens) for s in range(TOP_K)):
        expert = int(experts[token, slot])
        if expert >= 0:
            hidden = activate((meant_up[expert] @ x[token].double() + biases[0][expert].double())[None])[0]
            result = meant_down[expert] @ hidden.to(dtype).double() + biases[1][expert].double()
            wanted[token] += factors[token, slot].double() * result
    tiles = few_tokens_tiles(shape_of(form), tokens, SMS)
    if activation != "silu":
        tile = FewTokensTile(rows=32, warps=2, ahead=2, programs=2)
        tiles = FewTokensTiles(gate_up=tile, down=evolve(tile, rows=16, warps=8, ahead=3, k_warps=2))
    found = [
        experts_of_few_tokens(
            x.to(device),
            experts.to(device),
            factors.to(device),
            up,
            down,
            activation,
            tiles,
            gate_up_bias=biases[0].to(device),
            down_bias=biases[1].to(device),
        )
        for _ in range(2)
    ]
    assert torch.equal(*found)
    error = (found[0].cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-9)
    assert error < 0.006
