import pytest
import torch

from engine.plugins.kernels.scaled_matmul import MatmulTile, matmul
from engine.plugins.quant.eight_bit_codes import LARGE_TILE, MIDDLE_TILES, SMALL_TILES, matmul_tile

from .eight_bit import Operands, check_close

TILE = MatmulTile(rows=32, outputs=64, warps=4, stages=2)
LIMIT = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 1e-5}


def check(operands, tile, dtype):
    got = matmul(operands.x_codes, operands.x_scale, operands.weight, operands.scale, operands.bias, dtype, tile)
    assert got.dtype == dtype
    check_close(got, operands.exact(codes=True), LIMIT[dtype])


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("rows", "weight_rows", "inputs"), [(70, 90, 208), (32, 64, 256), (1, 16, 16)])
def test_codes_with_a_scale_a_row(kind, rows, weight_rows, inputs, device, half):
    operands = Operands(kind, rows, weight_rows, inputs, device, biased=rows == 70, half=half)
    check(operands, TILE, half)


def test_more_tiles_of_rows_than_are_taken_together(device, half):
    check(Operands("int8", 300, 130, 128, device, half=half), TILE, torch.float32)


def test_a_broken_row_stays_alone(device, half):
    operands = Operands("int8", 40, 64, 128, device, half=half)
    operands.x_scale[3] = float("nan")
    args = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, None, half, TILE)
    assert matmul(*args).isnan().any(1).nonzero().tolist() == [[3]]


def test_no_rows(device, half):
    operands = Operands("int8", 0, 64, 128, device, half=half)
    args = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, None, half, TILE)
    assert matmul(*args).shape == (0, 64)


def test_no_multiprocessor_is_idle_if_that_can_be():
    assert [matmul_tile(64, outputs, 132) for outputs in (4096, 6144, 28672)] == [SMALL_TILES[0]] * 2 + [SMALL_TILES[1]]
    assert [matmul_tile(128, outputs, 132) for outputs in (4096, 6144, 28672)] == [MIDDLE_TILES[0]] * 2 + [LARGE_TILE]
    assert [matmul_tile(256, outputs, 132) for outputs in (4096, 6144, 8192)] == [*MIDDLE_TILES, MIDDLE_TILES[1]]
    assert matmul_tile(512, 6144, 132) == LARGE_TILE


@pytest.mark.gpu
@pytest.mark.parametrize(("weight_rows", "inputs"), [(6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("rows", [64, 257, 2048])
def test_real_sizes(rows, weight_rows, inputs, device, half):
    for kind in ("fp8", "int8"):
        operands = Operands(kind, rows, weight_rows, inputs, device, half=half)
        for tile in (*SMALL_TILES, *MIDDLE_TILES, LARGE_TILE):
            check(operands, tile, half)
