"""W8A8 GEMM for many rows: x W^T of quantized x and W (float8 or int8), with the scales applied in the epilogue.

x has a scale per row, W a scale per output. The inputs of both are in the order of a W8Layout. Tiles are loaded by
tensor descriptors (TMA from compute capability 9.0 on), which fill with zeros outside the matrices. Where there are
fewer tiles than multiprocessors, several programs split the inputs of a tile (split_k.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.ops.common.launch import dependent_launch, release, wait
from engine.ops.gemm import persistent_matmul
from engine.ops.gemm.skinny_launch import MAX_PARTIAL_SUMS, MAX_SPLIT_TILES, Workspace
from engine.ops.gemm.split_k import add_others, is_last
from engine.ops.gemm.tile_order import place_of_tile, share_of_inputs

HALF_OF_SHARED = 112 * 1024
"""Bytes of shared memory per program where two share a multiprocessor, from compute capability 9.0 on."""


@frozen(kw_only=True)
class W8A8Tile:
    """A tile of the result, and how it is computed."""

    rows: int
    """Rows of x."""
    outputs: int
    """Rows of W."""
    warps: int
    stages: int
    """Software pipeline stages: pairs of tiles of x and W in shared memory."""
    block_k: int = 128
    """Inputs per loop iteration."""
    splits: int = 1
    """Split-K: programs that divide the inputs of one tile: 1, 2 or 4."""
    persistent: bool = False
    """Whether the persistent kernel computes it (persistent_matmul.py), on a GPU with wgmma. With splits its programs
    compute one tile each."""

    def __str__(self) -> str:
        more = (", persistent" if self.persistent else "") + (f", {self.splits} splits" if self.splits > 1 else "")
        return f"{self.rows}x{self.outputs}x{self.block_k}, {self.warps} warps, {self.stages} stages{more}"

    def programs(self, rows: int, outputs: int) -> int:
        """Number of tiles of a result."""
        return -(-rows // self.rows) * -(-outputs // self.outputs)

    def fits(self, rows: int, outputs: int) -> bool:
        """Whether a Workspace has room for the partial sums of all programs."""
        programs = self.programs(rows, outputs)
        sums = programs * self.splits * self.rows * self.outputs
        return self.splits == 1 or (programs <= MAX_SPLIT_TILES and sums <= MAX_PARTIAL_SUMS)

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor runs concurrently, 1 or 2, limited by shared memory and registers."""
        shared = self.stages * (self.rows + self.outputs) * self.block_k
        return 2 if self.warps <= 4 and shared <= HALF_OF_SHARED else 1


@triton.jit
def _store(out, total, x_scale, scale, bias, begin_m, begin_n, rows, outputs, BIAS: tl.constexpr):
    """Scale and store a tile. total: [BLOCK_M, BLOCK_N] float32 or int32, sums of products of quantized values."""
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
    """out = (x W^T) * x_scale * scale + bias, [rows, outputs]. Grid: (tiles, SPLITS).

    x, weight: descriptors of [rows, inputs] and [outputs, inputs]; scales and bias as in `matmul`. Each program loops
    over its inputs in steps of BLOCK_K, accumulating in float32 (int8: int32). SPLITS > 1: split-K; partials: [tiles,
    SPLITS, BLOCK_M, BLOCK_N] in the accumulator's dtype; arrivals: [tiles] int32, 0 before and after.
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
    release(PDL)  # late, as a long kernel: see ops/common/launch.py
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
    tile: W8A8Tile,
    workspace: Workspace,
) -> torch.Tensor:
    """(x W^T) * x_scale * scale + bias: [rows, outputs] in `dtype`, accumulated in float32 (int8: int32).

    x: [rows, inputs], of weight's dtype (float8 or int8); x_scale: [rows] float32. weight: [outputs, inputs]; scale:
    [outputs] float32; bias: [outputs]. All contiguous, rows of a multiple of 16 bytes. workspace: on the same device,
    with room for the tile's splits (`W8A8Tile.fits`).
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
    tile: W8A8Tile,
    workspace: Workspace,
) -> None:
    """Compile what `matmul` would launch, in the threads of an active triton.AsyncCompileMode."""
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
    tile: W8A8Tile,
    workspace: Workspace,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The kernel's arguments and its constexprs."""
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
