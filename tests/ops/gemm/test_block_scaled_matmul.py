"""The W8A8 GEMM with scales of 128 inputs, and the loads without TMA, against sums of products in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from engine.ops.activation.quantize_rows import Scaling, quantize_rows
from engine.ops.gemm.packed_layout import W8Layout
from engine.ops.gemm.scaled_matmul import W8A8Tile, matmul
from engine.ops.gemm.skinny_launch import Workspace

from .w8a8 import Operands, check_close, random_codes

TILE = W8A8Tile(rows=32, outputs=64, warps=4, stages=2)
LIMIT = {torch.float16: 2**-9, torch.bfloat16: 2**-6}


class Blocks:
    """Random quantized values, with scales of 1 x 128 of x and of scale_rows x 128 of W."""

    def __init__(self, rows: int, outputs: int, inputs: int, scale_rows: int, device: Any, half: Any) -> None:
        blocks = -(-inputs // 128)
        self.x = random_codes((rows, inputs), "fp8", device)
        self.weight = random_codes((outputs, inputs), "fp8", device)
        self.scale = torch.rand(-(-outputs // scale_rows), blocks, device=device) + 0.25
        self.x_scale = torch.full((blocks, -(-rows // 4) * 4), float("nan"), device=device)
        self.x_scale[:, :rows] = torch.rand(blocks, rows, device=device) + 0.25
        self.bias = torch.randn(outputs, device=device).to(half)
        self.scale_rows = scale_rows

    def exact(self) -> torch.Tensor:
        """Block by block, each product of 128 numbers alone."""
        total = self.bias.double()[None, :].repeat(len(self.x), 1)
        for block in range(self.scale.shape[1]):
            inputs = slice(128 * block, 128 * (block + 1))
            sums = self.x[:, inputs].double() @ self.weight[:, inputs].double().T
            for output in range(sums.shape[1]):
                factor = self.scale[output // self.scale_rows, block].double()
                total[:, output] += sums[:, output] * self.x_scale[block, : len(self.x)].double() * factor
        return total

    def multiply(self, tile: Any, dtype: Any, workspace: Any, **settings: Any) -> torch.Tensor:
        given = (self.x, self.x_scale, self.weight, self.scale, self.bias, dtype, tile, workspace)
        return matmul(*given, scale_rows=self.scale_rows, **settings)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "scale_rows", "tma"),
    [(37, 200, 384, 128, True), (33, 96, 256, 32, True), (37, 200, 384, 128, False)],
)
def test_block_scales_are_applied_to_the_sums_of_128_products(
    rows: int, outputs: int, inputs: int, scale_rows: int, tma: bool, device: torch.device, half: torch.dtype
) -> None:
    """Also where the last block of outputs is smaller, and where several blocks meet in a tile."""
    operands, workspace = Blocks(rows, outputs, inputs, scale_rows, device, half), Workspace(device)
    exact = operands.exact()
    for splits in (1, 2):
        got = operands.multiply(evolve(TILE, splits=splits), half, workspace, tma=tma)
        check_close(got, exact, LIMIT[half])
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(37, 90, 208), (32, 64, 256)])
def test_tiles_loaded_by_pointers_equal_those_loaded_by_descriptors(
    kind: str, rows: int, outputs: int, inputs: int, device: torch.device, half: torch.dtype
) -> None:
    operands, workspace = Operands(kind, rows, outputs, inputs, device, half=half), Workspace(device)
    given = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, None, half, TILE, workspace)
    got = matmul(*given, tma=False)
    check_close(got, operands.exact(codes=True), LIMIT[half])
    assert torch.equal(got, matmul(*given, tma=True))


@pytest.mark.parametrize("powers", [False, True])
def test_quantized_blocks_represent_their_numbers(powers: bool, device: torch.device) -> None:
    """Scales are the largest numbers of 128 inputs over 448, or the next power of two; there is room for 4 rows."""
    x = torch.randn(5, 300, device=device)
    x[2, 128:256] = 0
    scaling = Scaling(per_block=True, powers_of_two=powers)
    values, scales = quantize_rows(x, torch.int8, scaling=scaling)
    assert (values.shape, scales.shape) == ((5, 384), (3, 8))
    codes = W8Layout(dtype="int8").unpack(values, 300).double()
    for block in range(3):
        part = x[:, 128 * block : 128 * (block + 1)].double()
        wanted = part.abs().amax(1) / 127
        wanted = torch.where(wanted > 0, wanted.log2().ceil().exp2() if powers else wanted, 1.0)
        scale = scales[block, :5].double()
        torch.testing.assert_close(scale, wanted, rtol=1e-6, atol=0)
        error = (codes[:, 128 * block : 128 * (block + 1)] * scale[:, None] - part).abs()
        assert float((error / scale[:, None]).max()) <= 0.5 + 1e-4


def test_activations_beyond_the_bound_are_clamped(device: torch.device) -> None:
    x = torch.tensor([[1.0, -3.0, 1000.0], [1.0, 2.0, float("nan")]], device=device)
    values, scales = quantize_rows(x, torch.int8, scaling=Scaling(max_activation=8.0))
    torch.testing.assert_close(scales[:1], torch.tensor([8 / 127], device=device))
    assert W8Layout(dtype="int8").unpack(values, 3)[0].tolist() == [16, -48, 127]
    assert bool(scales[1].isnan())


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (1024, 640)])
@pytest.mark.parametrize("rows", [64, 129, 2048])
def test_products_equal_float64_at_real_sizes(
    rows: int, outputs: int, inputs: int, device: torch.device, half: torch.dtype
) -> None:
    operands, workspace = Blocks(rows, outputs, inputs, 128, device, half), Workspace(device)
    row = torch.arange(outputs, device=device) // 128
    column = torch.arange(inputs, device=device) // 128
    weight = operands.weight.double() * operands.scale.double()[row][:, column]
    x = operands.x.double() * operands.x_scale.T[:rows].double()[:, column]
    exact = x @ weight.T + operands.bias.double()
    for tile in (
        W8A8Tile(rows=64, outputs=64, warps=4, stages=5),
        W8A8Tile(rows=64, outputs=128, warps=4, stages=4),
        W8A8Tile(rows=128, outputs=128, warps=8, stages=4),
    ):
        check_close(operands.multiply(tile, half, workspace), exact, LIMIT[half])
        fewer = evolve(tile, stages=2)  # of pointers, for GPUs with less shared memory
        check_close(operands.multiply(fewer, half, workspace, tma=False), exact, LIMIT[half])
