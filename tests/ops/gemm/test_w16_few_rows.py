"""The kernel for few rows of x and small 16-bit weights: machine code, candidates, and results next to float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.ops.gemm import skinny_launch
from engine.ops.gemm.skinny_forms import FEW_ROWS_REGISTERS
from engine.ops.gemm.skinny_launch import (
    FEW_ROWS_MAX_WEIGHTS,
    GemmShape,
    SkinnyLaunch,
    SkinnyTile,
    Workspace,
    candidates,
    with_ahead,
)

from .few_rows import SMS, case, check_loop, compile_cases, products_of, tiles_of

TILES = [
    SkinnyTile(form="few_rows", rows=16, block_k=64, warps=warps, stages=stages) for warps, stages in FEW_ROWS_REGISTERS
]


def test_weights_go_from_memory_to_products_in_registers() -> None:
    tiles = tiles_of((16, 4, 6, 2, 3, 1), (16, 8, 4, 2, 2, 1), (16, 4, 4, 2, 4, 1))
    assert [(tile.warps, tile.ahead, tile.registers) for tile in tiles] == [
        (*tile, registers) for tile, registers in FEW_ROWS_REGISTERS.items()
    ]
    cases = [case(tile, gated=gated, half=gated) for tile in tiles for gated in (False, True)]
    compiled = compile_cases("engine.ops.gemm.w16_few_rows", "w16_few_rows_kernel", "*fp32", cases)
    for one, lines in zip(cases, compiled, strict=True):
        assert len(products_of(lines)) == 4 * one["tile"]["ahead"]  # a block of 64 inputs takes 4 products
        check_loop(lines)


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (1, {}),
        (16, {}),
        (4, {"dtype": "float32"}),
        (4, {"epilogue": "argmax"}),
        (4, {"inputs": 1028}),
        (4, {"outputs": FEW_ROWS_MAX_WEIGHTS // 1024 + 1}),
    ],
)
def test_other_shapes_have_no_such_candidates(rows: int, more: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_launch, "num_sms", lambda device: SMS)
    monkeypatch.setattr(skinny_launch, "has_wgmma", lambda device: True)
    given: dict[str, Any] = {"epilogue": "plain", "outputs": 1024, "inputs": 1024, "dtype": "bfloat16"}
    cpu = torch.device("cpu")
    assert candidates(GemmShape(**given), 4, cpu)[-len(TILES) :] == TILES
    assert not set(TILES) & set(candidates(GemmShape(**{**given, **more}), rows, cpu))


def test_tiles_do_not_prefetch_and_have_names_of_their_own() -> None:
    shape = GemmShape(epilogue="plain", outputs=1024, inputs=1024, dtype="bfloat16")
    assert not any(with_ahead(tile, shape, 2) for tile in TILES)
    assert len({str(tile) for tile in TILES}) == len(TILES)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("epilogue", ["plain", "gated"])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (33, 64), (100, 1544), (40, 72), (24, 4160)])
def test_products_equal_float64(
    hopper: torch.device, outputs: int, inputs: int, epilogue: Any, half: torch.dtype, tile: Any
) -> None:
    workspace = Workspace(hopper)
    shape = GemmShape(epilogue=epilogue, outputs=outputs, inputs=inputs, dtype=str(half)[6:])
    # What follows an operand in memory must not be read.
    weight = torch.full((shape.weight_rows + 1, inputs), float("nan"), dtype=half, device=hopper)
    weight[:-1] = torch.randn(shape.weight_rows, inputs, device=hopper) / inputs**0.5
    bias = torch.randn(shape.weight_rows, dtype=half, device=hopper)
    for rows in (2, 3, 7, 8):
        x = torch.full((rows + 1, inputs), float("nan"), dtype=half, device=hopper)
        x[:-1] = torch.randn(rows, inputs, device=hopper)
        for added in (None, bias):
            found = SkinnyLaunch(shape, tile, 8, workspace)(x[:-1], weight[:-1], added)
            exact = F.linear(x[:-1].double(), weight[:-1].double(), None if added is None else added.double())
            if epilogue == "gated":
                gate, up = exact.chunk(2, -1)
                exact = F.silu(gate) * up
            tolerance = 2**-7 if half == torch.bfloat16 else 2**-9
            torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
