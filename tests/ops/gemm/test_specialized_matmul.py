from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core.layers import gated_activation
from engine.ops.activation.act_and_mul import ACTIVATIONS, act_and_mul
from engine.ops.activation.quantize_rows import VALUE_ROW_MULTIPLE
from engine.ops.gemm import persistent_matmul, specialized_matmul
from engine.ops.gemm.scaled_matmul import GATED_TILE, gated_matmul, matmul
from engine.ops.gemm.scaled_operands import ScaledOperands
from engine.ops.gemm.skinny_launch import Workspace
from engine.plugins.quant.w8a8_waves import SQUARE_TILE

from .w8a8 import Operands, before_others, check_close

LIMIT = 2**-6


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("rows", "weight_rows", "inputs"),
    [(1, 272, 128), (257, 1032, 4224), (3001, 6160, 256), (2048, 6144, 4096), (4100, 4096, 14336)],
)
def test_specialized_warps_write_every_output_with_the_bits_of_the_others(
    kind: str, rows: int, weight_rows: int, inputs: int, hopper: torch.device
) -> None:
    operands = Operands(kind, rows, weight_rows, inputs, hopper, biased=rows == 257, half=torch.bfloat16)
    codes = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, operands.bias)
    results = [torch.full((rows, weight_rows), torch.nan, dtype=torch.bfloat16, device=hopper) for _ in range(2)]
    specialized_matmul.launch(results[0], ScaledOperands(*codes), GATED_TILE)
    persistent_matmul.launch(results[1], ScaledOperands(*codes), GATED_TILE, Workspace(hopper))
    assert not results[0].isnan().any()
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "size", "inputs"), [(1, 136, 128), (257, 520, 4224), (3001, 3080, 256), (2048, 3072, 4096)]
)
def test_gated_products_have_the_bits_of_separate_kernels(
    kind: str, activation: Any, rows: int, size: int, inputs: int, hopper: torch.device, half: torch.dtype
) -> None:
    operands = Operands(kind, rows, 2 * size, inputs, hopper, biased=rows == 257, half=half)
    codes = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, operands.bias)
    found = torch.full((rows, size), torch.nan, dtype=half, device=hopper)
    specialized_matmul.launch(found, ScaledOperands(*codes), GATED_TILE, activation=activation)
    check_close(found, gated_activation(activation)(operands.exact(codes=True)), LIMIT)
    assert torch.equal(found, act_and_mul(matmul(*codes, half, GATED_TILE, Workspace(hopper)), activation))
    others = before_others(codes[0], VALUE_ROW_MULTIPLE)
    for _ in range(10):
        assert torch.equal(gated_matmul(others, *codes[1:], half, activation), found)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_gated_products_keep_numbers_that_are_not_finite(kind: str, hopper: torch.device) -> None:
    workspace = Workspace(hopper)
    operands = Operands(kind, 200, 2 * 264, 256, hopper, half=torch.bfloat16)
    operands.x_scale[3], operands.x_scale[130] = torch.nan, torch.inf
    operands.scale[7], operands.scale[264 + 70] = torch.nan, torch.inf
    codes = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, None, torch.bfloat16)
    for activation in ACTIVATIONS:
        found = gated_matmul(*codes, activation)
        expected = act_and_mul(matmul(*codes, GATED_TILE, workspace), activation)
        assert found[3].isnan().all()
        assert found[:, 7].isnan().all()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [640, 1152, 2176])
def test_square_tiles_have_the_int8_bits_of_large_ones(rows: int, hopper: torch.device) -> None:
    operands = Operands("int8", rows, 4096, 4096, hopper, half=torch.bfloat16)
    codes = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, None, torch.bfloat16)
    square, large = (matmul(*codes, tile, Workspace(hopper)) for tile in (SQUARE_TILE, GATED_TILE))
    check_close(square, operands.exact(codes=True), LIMIT)
    assert torch.equal(square, large)
