"""x W^T for many rows of x and eight-bit codes of W, scales in the epilogue.

x is made of codes of W's type with scales of its own, its inputs in the same order as W's. Tiles come through tensor
descriptors (TMA from compute capability 9.0 on), which fill with zeros what lies outside.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.core.kernels.launch import dependent_launch, release, wait

SWIZZLE = tl.constexpr(8)
"""Programs next to each other take so many tiles of rows of x before the next tile of W, so that both stay in the L2
cache."""


@frozen(kw_only=True)
class MatmulTile:
    """What a program computes, and how."""

    rows: int
    """Of x."""
    outputs: int
    warps: int
    stages: int
    """Tiles in shared memory at once."""
    block_k: int = 128

    def __str__(self) -> str:
        return f"{self.rows}x{self.outputs}x{self.block_k}, {self.warps} warps, {self.stages} stages"

    def programs(self, rows: int, outputs: int) -> int:
        """Tiles of a result."""
        return -(-rows // self.rows) * -(-outputs // self.outputs)


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    out,
    x,
    weight,
    x_scale,
    scale,
    bias,
    rows,
    outputs,
    inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, weight: descriptors of [rows, inputs] and [outputs, inputs]; the scales as in `matmul`."""
    release(PDL)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    strip = tl.program_id(0) // (SWIZZLE * tiles_n)
    height = tl.minimum(tiles_m - strip * SWIZZLE, SWIZZLE)
    place = tl.program_id(0) % (SWIZZLE * tiles_n)
    begin_m = (strip * SWIZZLE + place % height) * BLOCK_M
    begin_n = place // height * BLOCK_N
    m = begin_m + tl.arange(0, BLOCK_M)
    n = begin_n + tl.arange(0, BLOCK_N)
    present = m < rows
    valid = n < outputs
    wait(PDL)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGER else tl.float32)
    for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        left = x.load([begin_m, start])
        right = weight.load([begin_n, start])
        total = tl.dot(left, right.T, total, out_dtype=tl.int32 if INTEGER else tl.float32)
    result = total.to(tl.float32)
    result *= tl.load(scale + n, mask=valid, other=0.0)[None, :]
    result *= tl.load(x_scale + m, mask=present, other=0.0)[:, None]
    if BIAS:
        result += tl.load(bias + n, mask=valid, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=present[:, None] & valid[None, :])


def matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: MatmulTile,
) -> torch.Tensor:
    """x: [rows, inputs] -> [rows, outputs] in `dtype`, added up in float32 (int8: in int32).

    x: codes of weight's type; x_scale: [rows] float32. weight: [outputs, inputs]; scale: [outputs] float32. All dense,
    rows of a multiple of 16 bytes.
    """
    rows, outputs = x.shape[0], weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if rows:
        arguments, constants = _launch(out, x, x_scale, weight, scale, bias, tile)
        _matmul_kernel[(tile.programs(rows, outputs),)](*arguments, **constants)
    return out


def compile_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: MatmulTile,
) -> None:
    """What `matmul` would launch, in the threads of a triton.AsyncCompileMode if one is active."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    arguments, constants = _launch(out, x, x_scale, weight, scale, bias, tile)
    _matmul_kernel.warmup(*arguments, grid=(1,), **constants)


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    tile: MatmulTile,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Arguments of the kernel, and its constants."""
    arguments = (
        out,
        TensorDescriptor.from_tensor(x, [tile.rows, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.outputs, tile.block_k]),
        x_scale,
        scale,
        scale if bias is None else bias,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
    )
    constants: dict[str, object] = {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "INTEGER": weight.dtype == torch.int8,
        "BIAS": bias is not None,
        "num_warps": tile.warps,
        **dependent_launch(x.device),
    }
    return arguments, constants
