"""x W^T for many rows of x and eight-bit codes of W, scales in the epilogue.

x is made of codes of W's type with scales of its own, its inputs in the same order as W's. Tiles come through tensor
descriptors (TMA from compute capability 9.0 on), which fill with zeros what lies outside.

Where there are fewer tiles than multiprocessors, several programs share the inputs of a tile (split_sums.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.gemm import persistent_matmul
from engine.ops.gemm.skinny_launch import MOST_PROGRAMS, MOST_SUMS, Workspace
from engine.ops.gemm.split_k import add_others, is_last
from engine.ops.gemm.tile_order import place_of_tile, share_of_inputs

HALF_OF_SHARED = 112 * 1024
"""Bytes of a multiprocessor's shared memory for each of two programs, from compute capability 9.0 on."""


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
    splits: int = 1
    """Programs that share the inputs of one tile: 1, 2 or 4."""
    persistent: bool = False
    """By the kernel of persistent_matmul, where a GPU has wgmma. With splits a program takes one tile only."""

    def __str__(self) -> str:
        more = (", persistent" if self.persistent else "") + (f", {self.splits} splits" if self.splits > 1 else "")
        return f"{self.rows}x{self.outputs}x{self.block_k}, {self.warps} warps, {self.stages} stages{more}"

    def programs(self, rows: int, outputs: int) -> int:
        """Tiles of a result."""
        return -(-rows // self.rows) * -(-outputs // self.outputs)

    def fits(self, rows: int, outputs: int) -> bool:
        """Whether a Workspace has room for the sums of all programs."""
        programs = self.programs(rows, outputs)
        sums = programs * self.splits * self.rows * self.outputs
        return self.splits == 1 or (programs <= MOST_PROGRAMS and sums <= MOST_SUMS)

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor runs at once, of one or two: as shared memory and registers allow it."""
        shared = self.stages * (self.rows + self.outputs) * self.block_k
        return 2 if self.warps <= 4 and shared <= HALF_OF_SHARED else 1


@triton.jit
def _store(out, total, x_scale, scale, bias, begin_m, begin_n, rows, outputs, BIAS: tl.constexpr):
    """total: [BLOCK_M, BLOCK_N] float32 or int32, of the products of codes."""
    m = begin_m + tl.arange(0, total.shape[0])
    n = begin_n + tl.arange(0, total.shape[1])
    present = m < rows
    valid = n < outputs
    result = total.to(tl.float32)
    result *= tl.load(scale + n, mask=valid, other=0.0)[None, :]
    result *= tl.load(x_scale + m, mask=present, other=0.0)[:, None]
    if BIAS:
        result += tl.load(bias + n, mask=valid, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=present[:, None] & valid[None, :])


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    out,
    x,
    weight,
    x_scale,
    scale,
    bias,
    partials,
    arrivals,
    rows,
    outputs,
    inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    INTEGER: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, weight: descriptors of [rows, inputs] and [outputs, inputs]; the scales as in `matmul`. Grid: tiles, splits.

    SPLITS: programs that differ in their second number share the inputs of a tile; partials: [tiles, splits, BLOCK_M,
    BLOCK_N] in the type of sums; arrivals: [tiles] int32, 0 before and after.
    """
    tile = tl.program_id(0)
    begin_m, begin_n = place_of_tile(tile, rows, outputs, BLOCK_M, BLOCK_N)
    first = 0
    end = inputs
    if SPLITS > 1:
        first, end = share_of_inputs(inputs, BLOCK_K, SPLITS)
    wait(PDL)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGER else tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        left = x.load([begin_m, start])
        right = weight.load([begin_n, start])
        total = tl.dot(left, right.T, total, out_dtype=tl.int32 if INTEGER else tl.float32)
    release(PDL)  # see kernels.launch
    if SPLITS > 1:
        lane = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mine = partials + tile * (SPLITS * BLOCK_M * BLOCK_N)
        if is_last(total, lane, mine, arrivals + tile, SPLITS):
            total = add_others(total, lane, mine, arrivals + tile, SPLITS)
            _store(out, total, x_scale, scale, bias, begin_m, begin_n, rows, outputs, BIAS)
    else:
        _store(out, total, x_scale, scale, bias, begin_m, begin_n, rows, outputs, BIAS)


def matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: MatmulTile,
    workspace: Workspace,
) -> torch.Tensor:
    """x: [rows, inputs] -> [rows, outputs] in `dtype`, added up in float32 (int8: in int32).

    x: codes of weight's type; x_scale: [rows] float32. weight: [outputs, inputs]; scale: [outputs] float32. All dense,
    rows of a multiple of 16 bytes. workspace: of the same device; where the tile has splits, they must fit it.
    """
    rows, outputs = x.shape[0], weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if rows and tile.persistent:
        persistent_matmul.launch(out, x, x_scale, weight, scale, bias, tile, workspace)
    elif rows:
        arguments, constants = _launch(out, x, x_scale, weight, scale, bias, tile, workspace)
        _matmul_kernel[(tile.programs(rows, outputs), tile.splits)](*arguments, **constants)
    return out


def compile_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: MatmulTile,
    workspace: Workspace,
) -> None:
    """What `matmul` would launch, in the threads of a triton.AsyncCompileMode if one is active."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    if tile.persistent:
        persistent_matmul.launch(out, x, x_scale, weight, scale, bias, tile, workspace, compile_only=True)
        return
    arguments, constants = _launch(out, x, x_scale, weight, scale, bias, tile, workspace)
    _matmul_kernel.warmup(*arguments, grid=(1,), **constants)


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    tile: MatmulTile,
    workspace: Workspace,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Arguments of the kernel, and its constants."""
    is_integer = weight.dtype == torch.int8
    arguments = (
        out,
        TensorDescriptor.from_tensor(x, [tile.rows, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.outputs, tile.block_k]),
        x_scale,
        scale,
        scale if bias is None else bias,
        workspace.partials.view(torch.int32) if is_integer else workspace.partials,
        workspace.arrivals,
        x.shape[0],
        weight.shape[0],
        x.shape[1],
    )
    constants: dict[str, object] = {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "SPLITS": tile.splits,
        "INTEGER": is_integer,
        "BIAS": bias is not None,
        "num_warps": tile.warps,
        **dependent_launch(x.device),
    }
    return arguments, constants
