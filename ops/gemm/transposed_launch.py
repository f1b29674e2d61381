"""Launches of the transposed W8A8 GEMM: tiles, and which of them a weight and a device support."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.ops.activation.act_and_mul import ACTIVATIONS
from engine.ops.common.launch import dependent_launch, num_sms
from engine.ops.gemm.scaled_operands import ScaledOperands
from engine.ops.gemm.skinny_launch import MAX_PARTIAL_SUMS, Workspace
from engine.ops.gemm.tile_order import loaded_shape
from engine.ops.gemm.transposed_matmul import RUN, matmul_kernel

PART = 128
"""Rows of x in the first accumulator."""
BLOCK_K = 128
"""Inputs per stage."""
PIECE = 32
"""Rows of x per TMA store."""
EVEN_SHARE = 7 / 8
"""Share of the multiprocessors from which on it is better that all tiles have equally many programs."""


@frozen(kw_only=True)
class TransposedTile:
    """A tile of W x^T, and how it is computed."""

    weight_rows: int
    """Rows of W: 64 or 128."""
    rest: int
    """Rows of x in the second accumulator: 32, 64 or 128."""
    stages: int
    """Stages of W and x in shared memory."""

    def __str__(self) -> str:
        return f"{self.weight_rows} of W by {self.rows} rows, {self.stages} stages"

    @property
    def rows(self) -> int:
        """Rows of x, at most."""
        return PART + self.rest

    @property
    def warps(self) -> int:
        """Warps that multiply."""
        return self.weight_rows // 16

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory per program."""
        return self.stages * (self.weight_rows + self.rows) * BLOCK_K + 2 * 2 * self.weight_rows * PIECE

    def programs(self, outputs: int, inputs: int, sms: int) -> int:
        """Programs of a launch, for whose sums a Workspace has room. outputs: rows of W."""
        tiles = -(-outputs // self.weight_rows)
        most = min(sms, MAX_PARTIAL_SUMS // (self.weight_rows * self.rows))
        if tiles >= most:
            return most
        # Equally many programs per tile, unless that leaves too many multiprocessors idle.
        even = most // tiles * tiles
        return min(even if even >= EVEN_SHARE * most else most, tiles * -(-inputs // BLOCK_K))


def shared_tiles(tiles: int, programs: int) -> int:
    """Tiles that all programs share: those that fill no wave.

    Where these are few, those of one wave too, so that no more than two programs share a tile.
    """
    rest = tiles % programs
    return rest + programs if 0 < rest <= programs // 2 and tiles > programs else rest


def launch(
    out: torch.Tensor,
    operands: ScaledOperands,
    tile: TransposedTile,
    workspace: Workspace,
    *,
    activation: str | None = None,
    compile_only: bool = False,
) -> None:
    """As specialized_matmul.launch, for at most as many rows of x as the tile has."""
    x, weight = operands.x, operands.weight
    rows, inputs = x.shape
    weight_rows = weight.shape[0]
    assert rows <= tile.rows, f"{tile} has fewer rows than x"
    layout_8_bit = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    outputs = tile.weight_rows if activation is None else tile.weight_rows // 2
    layout_16_bit = gl.NVMMASharedLayout(swizzle_byte_width=min(2 * outputs, 128), element_bitwidth=16, rank=2)
    shape, strides = loaded_shape(x, tile.rows)
    programs = tile.programs(weight_rows, inputs, num_sms(x.device))
    arguments = (
        TensorDescriptor.from_tensor(out, [PIECE, outputs], layout_16_bit),
        TensorDescriptor(x, shape, strides, [PART, BLOCK_K], layout_8_bit),
        TensorDescriptor(x, shape, strides, [tile.rest, BLOCK_K], layout_8_bit),
        _describe_weight(weight, tile, gated=activation is not None),
        *operands.scales_and_bias,
        *operands.memory_of_splits(workspace),
        rows,
        weight_rows,
        -(-inputs // BLOCK_K),
        shared_tiles(-(-weight_rows // tile.weight_rows), programs),
    )
    constants: dict[str, Any] = {
        "BLOCK_W": tile.weight_rows,
        "STAGES": tile.stages,
        "BIAS": operands.bias is not None,
        "ACTIVATION": None if activation is None else ACTIVATIONS[activation].value,
        "num_warps": tile.warps,
        **dependent_launch(x.device),
    }
    if compile_only:
        matmul_kernel.warmup(*arguments, grid=(1,), **constants)
    else:
        matmul_kernel[(programs,)](*arguments, **constants)


def transposed_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: TransposedTile,
    workspace: Workspace,
    *,
    activation: str | None = None,
    compile_only: bool = False,
) -> torch.Tensor:
    """As scaled_matmul.matmul, or with an activation gated_matmul, by a tile of W x^T. For GPUs with wgmma.

    compile_only: compile what would be launched, as the active triton.AsyncCompileMode says; the result is arbitrary.
    """
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    out = torch.empty((x.shape[0], outputs), dtype=dtype, device=x.device)
    if x.shape[0]:
        operands = ScaledOperands(x, x_scale, weight, scale, bias)
        launch(out, operands, tile, workspace, activation=activation, compile_only=compile_only)
    return out


def _describe_weight(weight: torch.Tensor, tile: TransposedTile, *, gated: bool) -> TensorDescriptor:
    """Descriptor of a tile of W. Gated: of runs of gate and up rows in turns."""
    if not gated:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
        return TensorDescriptor.from_tensor(weight, [tile.weight_rows, BLOCK_K], layout)
    weight_rows, inputs = weight.shape
    run = RUN.value
    shape = [weight_rows // (2 * run), 2, run, inputs]
    strides = [run * inputs, weight_rows // 2 * inputs, inputs, 1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
    return TensorDescriptor(weight, shape, strides, [tile.weight_rows // (2 * run), 2, run, BLOCK_K], layout)
