"""4-bit weights of experts: packed, and unpacked by the kernel that multiplies them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.ops.experts.grouped_matmul import GroupedTile, grouped_matmul
from engine.ops.experts.grouped_matmul_4bit import MAX_ROWS_OF_SCALED_SUMS
from engine.ops.experts.pack import pack_fp4, pack_int4, scale_dtype
from engine.ops.experts.sort import PairSorter
from engine.ops.experts.weights import ExpertMatrix, StackedWeight, WeightFormat

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
"""E2M1 numbers by their bits."""
INPUTS, OUTPUTS = 176, 40
"""Multiples of no block, tile or group of 64."""


def skip_if_unsupported(dtype: torch.dtype, device: torch.device) -> None:
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter multiplies no matrices of bfloat16")


def unpacked(
    matrix: ExpertMatrix, form: WeightFormat, dtype: torch.dtype, device: torch.device, rows: int = 16
) -> torch.Tensor:
    """The weights as the kernel multiplies them: [outputs, inputs] float32, from products with unit vectors."""
    weight = StackedWeight(
        values=matrix.values[None].to(device),
        format=form,
        scales=matrix.scales[None].to(device),
        factors=None if matrix.factor is None else matrix.factor[None].to(device),
    )
    pairs = PairSorter(1, 1, device)(torch.zeros(INPUTS, 1, dtype=torch.int32, device=device), rows)
    x = torch.eye(INPUTS, dtype=dtype, device=device)
    tile = GroupedTile(outputs=64, block_k=128, warps=4, stages=2)
    return grouped_matmul(x, weight, pairs, rows, tile, dtype=torch.float32, scatter=True).T.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("low", "high"), [(110, 128), (0, 30), (120, 250), (248, 253)], ids=["usual", "tiny", "over 120 binades", "huge"]
)
def test_fp4_weights_are_exact_for_scales_of_any_size(
    low: int, high: int, dtype: torch.dtype, device: torch.device
) -> None:
    skip_if_unsupported(dtype, device)
    values = torch.arange(OUTPUTS * INPUTS, dtype=torch.int64).view(OUTPUTS, INPUTS) % 16
    scales = torch.randint(low, high, (-(-INPUTS // 32), OUTPUTS), dtype=torch.uint8)
    scales[0, 0] = high - 1
    meant = FP4[values] * 2.0 ** (scales.double() - 127).repeat_interleave(32, 0)[:INPUTS].T
    found = unpacked(pack_fp4(values.to(torch.uint8), scales), WeightFormat(kind="fp4", group=32), dtype, device)
    assert torch.equal(found.double(), meant.float().double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "rows"), [(32, 16), (64, 16), (128, 8), (128, 16), (128, 32)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_weights_are_rounded_once_or_exact_where_sums_are_scaled(
    group: int, rows: int, symmetric: bool, dtype: torch.dtype, device: torch.device
) -> None:
    skip_if_unsupported(dtype, device)
    values = torch.arange(OUTPUTS * INPUTS, dtype=torch.int64).view(OUTPUTS, INPUTS) % 16
    groups = -(-INPUTS // group)
    scales = (torch.rand(groups, OUTPUTS) + 0.01).to(scale_dtype(dtype))
    zeros = torch.randint(0, 16, (groups, OUTPUTS), dtype=torch.uint8)
    matrix = pack_int4(values.to(torch.uint8), scales, None if symmetric else zeros, group, dtype)
    centre = torch.full_like(zeros, 8) if symmetric else zeros

    def of_input(numbers: torch.Tensor) -> Any:
        return numbers.double().repeat_interleave(group, 0)[:INPUTS].T

    is_exact = group == 128 and rows <= MAX_ROWS_OF_SCALED_SUMS
    meant = ((values - of_input(centre)) * of_input(scales)).to(torch.float32 if is_exact else dtype)
    found = unpacked(matrix, WeightFormat(kind="int4", group=group), dtype, device, rows)
    assert torch.equal(found, meant.float())
