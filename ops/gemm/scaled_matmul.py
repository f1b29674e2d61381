"""W8A8 GEMM for many rows: x W^T of quantized x and W (float8 or int8).

x has a scale per row and W one per output, applied in the epilogue; or both have scales of blocks of 128 inputs,
applied to the sums of every 128 products. The inputs of both are in the order of a W8Layout. Tiles are loaded by tensor
descriptors where there is TMA, and else by pointers, asynchronously too. Where there are fewer tiles than
multiprocessors, several programs split the inputs of a tile (split_k.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.ops.common.launch import dependent_launch, has_tma, release, wait
from engine.ops.gemm import persistent_matmul, specialized_matmul
from engine.ops.gemm.scaled_operands import ScaledOperands
from engine.ops.gemm.skinny_launch import MAX_PARTIAL_SUMS, MAX_SPLIT_TILES, Workspace
from engine.ops.gemm.split_k import add_others, is_last
from engine.ops.gemm.tile_order import loaded_shape, place_of_tile, share_of_inputs

HALF_OF_SHARED = 112 * 1024
"""Bytes of shared memory per program where two share a multiprocessor, from compute capability 9.0 on."""
BLOCK_INPUTS = tl.constexpr(128)
"""Inputs of x, and of W, that share a scale of blocks."""


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
    def shared_memory(self) -> int:
        """Bytes of shared memory per program."""
        return self.stages * (self.rows + self.outputs) * self.block_k

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor runs concurrently, 1 or 2, limited by shared memory and registers."""
        return 2 if self.warps <= 4 and self.shared_memory <= HALF_OF_SHARED else 1


GATED_TILE = W8A8Tile(rows=128, outputs=256, warps=8, stages=4, persistent=True)
"""The tile of `gated_matmul`: 128 columns of the result, as its outputs are of the gate and of the up projection."""


@triton.jit
def _store(out, total, x_scale, scale, bias, begin_m, begin_n, rows, outputs, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Store a tile. total: [BLOCK_M, BLOCK_N] float32 or int32. SCALED: the sums are scaled already."""
    m = begin_m + tl.arange(0, total.shape[0])
    n = begin_n + tl.arange(0, total.shape[1])
    present = m < rows
    valid = n < outputs
    result = total.to(tl.float32)
    if not SCALED:
        result *= tl.load(scale + n, mask=valid, other=0.0)[None, :]
        result *= tl.load(x_scale + m, mask=present, other=0.0)[:, None]
    if BIAS:
        result += tl.load(bias + n, mask=valid, other=0.0).to(tl.float32)[None, :]
    target = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=present[:, None] & valid[None, :])


@triton.jit
def _load(
    matrix,
    begin,
    start,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A tile of a matrix [rows, columns], zeros outside. matrix: with TMA a descriptor, else a pointer."""
    if TMA:
        tile = matrix.load([begin, start])
    else:
        row = begin + tl.arange(0, ROWS)
        column = start + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None]
        if not WHOLE:
            mask = mask & (column < columns)[None, :]
        tile = tl.load(matrix + row.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
def _block_scales(
    x_scale,
    scale,
    begin_m,
    begin_n,
    rows,
    outputs,
    inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
):
    """The factors of a tile of sums of 128 products: [BLOCK_M, BLOCK_N], or [BLOCK_M, 1] if all outputs share a scale.

    x_scale, scale: at the first row's, and the first output's, scale of these 128 inputs.
    """
    m = begin_m + tl.arange(0, BLOCK_M)
    of_x = tl.load(x_scale + m, mask=m < rows, other=0.0)
    blocks = tl.cdiv(inputs, BLOCK_INPUTS)
    if SCALE_ROWS % BLOCK_N == 0:
        factors = (of_x * tl.load(scale + begin_n // SCALE_ROWS * blocks))[:, None]
    else:
        n = begin_n + tl.arange(0, BLOCK_N)
        of_weight = tl.load(scale + n // SCALE_ROWS * blocks, mask=n < outputs, other=0.0)
        factors = of_x[:, None] * of_weight[None, :]
    return factors


@triton.jit(do_not_specialize=["rows", "x_scale_stride"])
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
    x_scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    INTEGER: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    TMA: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = (x W^T) * x_scale * scale + bias, [rows, outputs]. Grid: (tiles, SPLITS).

    x, weight: [rows, inputs] and [outputs, inputs], see `_load`; scales and bias as in `matmul`. Each program loops
    over its inputs in steps of BLOCK_K, accumulating in float32 (int8: int32). SCALE_ROWS: outputs per block scale;
    0: scales are not of blocks. WHOLE: inputs fill all steps. SPLITS > 1: split-K; partials: [tiles, SPLITS, BLOCK_M,
    BLOCK_N] in the accumulator's dtype; arrivals: [tiles] int32, 0 before and after.
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
        left = _load(x, begin_m, start, rows, inputs, BLOCK_M, BLOCK_K, TMA, WHOLE)
        right = _load(weight, begin_n, start, outputs, inputs, BLOCK_N, BLOCK_K, TMA, WHOLE)
        if SCALE_ROWS:
            # The tensor cores add up 128 products only: float8 sums in them have fewer digits than float32.
            part = tl.dot(left, right.T, out_dtype=tl.float32)
            block = start // BLOCK_INPUTS
            of_x = x_scale + block * x_scale_stride
            of_weight = scale + block
            total += part * _block_scales(
                of_x, of_weight, begin_m, begin_n, rows, outputs, inputs, BLOCK_M, BLOCK_N, SCALE_ROWS
            )
        else:
            total = tl.dot(left, right.T, total, out_dtype=tl.int32 if INTEGER else tl.float32)
    release(PDL)  # late, as a long kernel: see ops/common/launch.py
    SCALED: tl.constexpr = SCALE_ROWS > 0
    if SPLITS > 1:
        lane = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mine = partials + tile * (SPLITS * BLOCK_M * BLOCK_N)
        if is_last(total, lane, mine, arrivals + tile, SPLITS):
            total = add_others(total, lane, mine, arrivals + tile, SPLITS)
            _store(out, total, x_scale, scale, bias, begin_m, begin_n, rows, outputs, SCALED, BIAS)
    else:
        _store(out, total, x_scale, scale, bias, begin_m, begin_n, rows, outputs, SCALED, BIAS)


def matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: W8A8Tile,
    workspace: Workspace,
    *,
    scale_rows: int = 0,
    tma: bool | None = None,
) -> torch.Tensor:
    """(x W^T) * x_scale * scale + bias: [rows, outputs] in `dtype`, accumulated in float32 (int8: int32).

    x: [rows, inputs], of weight's dtype (float8 or int8); x_scale: [rows] float32. weight: [outputs, inputs]; scale:
    [outputs] float32; bias: [outputs]. All contiguous, rows of a multiple of 16 bytes. workspace: on the same device,
    with room for the tile's splits (`W8A8Tile.fits`).

    scale_rows: outputs per scale, for scales of blocks; scale is then [ceil(outputs / scale_rows), blocks] and x_scale
    [blocks, at least rows], and the tile has a block_k of BLOCK_INPUTS and is not persistent. tma: whether
    tiles are loaded by tensor descriptors; None: where the device has TMA.
    """
    rows, outputs = x.shape[0], weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    operands = ScaledOperands(x, x_scale, weight, scale, bias)
    if rows and tile.persistent:
        _launch_persistent(out, operands, tile, workspace)
    elif rows:
        tma = has_tma(x.device) if tma is None else tma
        arguments, constants = _launch(out, operands, tile, workspace, scale_rows, tma)
        _matmul_kernel[(tile.programs(rows, outputs), tile.splits)](*arguments, **constants)
    return out


def gated_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    activation: str,
) -> torch.Tensor:
    """act(gate) * up, where gate and up are the halves of `matmul`'s columns: [rows, outputs / 2] in `dtype`, 16 bits.

    Equal to act_and_mul of `matmul`'s result with GATED_TILE, bit for bit. For GPUs with wgmma; outputs are a multiple
    of 16. activation: one of act_and_mul.ACTIVATIONS. The rest as in `matmul`.
    """
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=dtype, device=x.device)
    if x.shape[0]:
        operands = ScaledOperands(x, x_scale, weight, scale, bias)
        specialized_matmul.launch(out, operands, GATED_TILE, activation=activation)
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
    *,
    scale_rows: int = 0,
) -> None:
    """Compile what `matmul` would launch, as the active triton.AsyncCompileMode says."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=dtype, device=x.device)
    operands = ScaledOperands(x, x_scale, weight, scale, bias)
    if tile.persistent:
        _launch_persistent(out, operands, tile, workspace, compile_only=True)
        return
    arguments, constants = _launch(out, operands, tile, workspace, scale_rows, has_tma(x.device))
    _matmul_kernel.warmup(*arguments, grid=(1,), **constants)


def _launch_persistent(
    out: torch.Tensor,
    operands: ScaledOperands,
    tile: W8A8Tile,
    workspace: Workspace,
    *,
    compile_only: bool = False,
) -> None:
    if specialized_matmul.is_specialized(tile):
        specialized_matmul.launch(out, operands, tile, compile_only=compile_only)
    else:
        persistent_matmul.launch(out, operands, tile, workspace, compile_only=compile_only)


def _launch(
    out: torch.Tensor,
    operands: ScaledOperands,
    tile: W8A8Tile,
    workspace: Workspace,
    scale_rows: int,
    tma: bool,
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The kernel's arguments and its constexprs."""
    x, weight = operands.x, operands.weight
    arguments = (
        out,
        TensorDescriptor(x, *loaded_shape(x, tile.rows), [tile.rows, tile.block_k]) if tma else x,
        TensorDescriptor.from_tensor(weight, [tile.outputs, tile.block_k]) if tma else weight,
        *operands.scales_and_bias,
        *operands.memory_of_splits(workspace),
        x.shape[0],
        weight.shape[0],
        x.shape[1],
        operands.x_scale.shape[-1],
    )
    constants: dict[str, object] = {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
        "SPLITS": tile.splits,
        "INTEGER": weight.dtype == torch.int8,
        "SCALE_ROWS": scale_rows,
        "TMA": tma,
        "WHOLE": x.shape[1] % tile.block_k == 0,
        "BIAS": operands.bias is not None,
        "num_warps": tile.warps,
        **dependent_launch(x.device),
    }
    return arguments, constants
