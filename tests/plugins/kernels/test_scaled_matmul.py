import pytest
import torch

from engine.plugins.kernels.scaled_matmul import MatmulTile, matmul
from engine.plugins.quant.eight_bit_gpu import MATMUL_TILE, MATMUL_TILE_BLOCKED, MATMUL_TILE_WIDENED

from .eight_bit import Operands, check_close

TILE = MatmulTile(rows=32, outputs=64, warps=4, stages=2)
LIMIT = {torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float32: 1e-5}


def check(operands, tile, dtype, *, codes, scale_rows=0):
    x, x_scale = (operands.x_codes, operands.x_scale) if codes else (operands.x, None)
    got = matmul(x, x_scale, operands.weight, operands.scale, operands.bias, dtype, tile, scale_rows)
    assert got.dtype == dtype
    check_close(got, operands.exact(codes=codes, gated=False), LIMIT[dtype])


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(("rows", "weight_rows", "inputs"), [(70, 90, 208), (32, 64, 256), (1, 16, 16)])
def test_codes_with_a_scale_a_row(kind, codes, rows, weight_rows, inputs, device, half):
    operands = Operands(kind, rows, weight_rows, inputs, device, biased=rows == 70, half=half)
    check(operands, TILE, half, codes=codes)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("scale_rows", [4, 128])
def test_scales_of_blocks(codes, scale_rows, device, half):
    operands = Operands("fp8", 40, 200, 272, device, scale_rows=scale_rows, half=half)
    check(operands, TILE, half, codes=codes, scale_rows=scale_rows)


def test_more_tiles_of_rows_than_are_taken_together(device, half):
    check(Operands("int8", 300, 130, 128, device, half=half), TILE, torch.float32, codes=True)


def test_a_broken_row_stays_alone(device, half):
    operands = Operands("int8", 40, 64, 128, device, half=half)
    operands.x_scale[3] = float("nan")
    args = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, None, half, TILE)
    assert matmul(*args).isnan().any(1).nonzero().tolist() == [[3]]


def test_no_rows(device, half):
    operands = Operands("int8", 0, 64, 128, device, half=half)
    args = (operands.x_codes, operands.x_scale, operands.weight, operands.scale, None, half, TILE)
    assert matmul(*args).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize(("weight_rows", "inputs"), [(6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("rows", [257, 2048])
def test_real_sizes(rows, weight_rows, inputs, device, half):
    for kind in ("fp8", "int8"):
        operands = Operands(kind, rows, weight_rows, inputs, device, half=half)
        check(operands, MATMUL_TILE, half, codes=True)
        check(operands, MATMUL_TILE_WIDENED, half, codes=False)
    operands = Operands("fp8", rows, weight_rows, inputs, device, scale_rows=128, half=half)
    check(operands, MATMUL_TILE_BLOCKED, half, codes=True, scale_rows=128)
