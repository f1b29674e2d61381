"""Launches of the persistent W4A16 kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.ops.common.launch import dependent_launch, has_wgmma, num_sms
from engine.ops.gemm import persistent_w4a16, specialized_w4a16
from engine.ops.gemm.persistent_tile import PersistentTile
from engine.ops.gemm.persistent_w4a16 import RUN
from engine.ops.gemm.skinny import PLAIN
from engine.ops.gemm.skinny_launch import gated_epilogue
from engine.ops.gemm.tile_order import loaded_shape
from engine.ops.gemm.w4a16_parts import PART

if TYPE_CHECKING:
    from engine.ops.gemm.packed_layout import PackedMatrix


@frozen(eq=False)
class StreamKWorkspace:
    """Memory for the partial sums and counters of Stream-K. All layers share one, as their kernels run in sequence."""

    partials: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> StreamKWorkspace:
        """Room for a tile of each multiprocessor; none on a device without wgmma."""
        programs = num_sms(device) if has_wgmma(device) else 0
        return cls(
            torch.empty(programs * PersistentTile.max_sums, dtype=torch.float32, device=device),
            torch.zeros(programs, dtype=torch.int32, device=device),
        )


def _swizzled(rank: int) -> gl.NVMMASharedLayout:
    """The layout of a tile in shared memory whose rows have a multiple of 128 bytes."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def _describe_words(packed: torch.Tensor, *, gated: bool) -> TensorDescriptor:
    """Descriptor of the words of a part of a tile, and a block. Gated: of runs of gate and up rows in turn."""
    blocks, weight_rows, span = packed.shape
    if not gated:
        return TensorDescriptor(packed, [blocks * weight_rows, span], [span, 1], [PART.value, span], _swizzled(2))
    run = RUN.value
    half = weight_rows // 2
    shape = [blocks, half // run, 2, run, span]
    strides = [weight_rows * span, run * span, half * span, span, 1]
    return TensorDescriptor(packed, shape, strides, [1, PART.value // (2 * run), 2, run, span], _swizzled(5))


def _constants_of(tile: PersistentTile) -> dict[str, int]:
    """The constants of a tile's kernel."""
    constants = {"STEPS": tile.steps, "STAGES": tile.stages}
    if not tile.is_specialized:
        return constants | {"BLOCK_N": tile.rows}
    parts = tile.rows // PART.value
    return constants | {"PARTS": parts, "SLOTS": tile.slots, "PENDING": tile.pending, "SPLITS": tile.splits}


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    matrix: PackedMatrix,
    bias: torch.Tensor | None,
    tile: PersistentTile,
    workspace: StreamKWorkspace,
    polled_sums: torch.Tensor,
    *,
    gated: bool = False,
    activation: str = "silu",
    compile_only: bool = False,
) -> None:
    """Write x W^T + bias, or act(gate) * up of it, to `out`, [rows, outputs], of x's dtype.

    x: [rows, inputs], at least one row; matrix: as PersistentTile.supports says. Both contiguous, from a multiple of 16
    bytes on. polled_sums: see split_k_exchange.py, MAX_POLLED_SUMS words. compile_only: compile without a launch, as
    the active triton.AsyncCompileMode says.
    """
    blocks, weight_rows, span = matrix.packed.shape
    outputs = PART.value // 2 if gated else PART.value
    is_split = tile.splits > 1
    kernel = specialized_w4a16.matmul_kernel if tile.is_specialized else persistent_w4a16.matmul_kernel
    stored = tile.rest or tile.columns
    shape, strides = loaded_shape(x, tile.columns)
    rest = TensorDescriptor(x, shape, strides, [tile.rest, span], _swizzled(2)) if tile.rest else None
    arguments = (
        out if is_split else TensorDescriptor.from_tensor(out, [stored, outputs], _swizzled(2)),
        TensorDescriptor(x, shape, strides, [tile.columns - tile.rest, span], _swizzled(2)),
        *((rest,) if tile.is_specialized else ()),
        _describe_words(matrix.packed, gated=gated),
        matrix.scales.view(torch.int32),
        x if bias is None else bias,
        polled_sums if is_split else workspace.partials,
        workspace.arrivals,
        x.shape[0],
        weight_rows,
        blocks,
    )
    constants = {
        **_constants_of(tile),
        "GROUPS": matrix.layout.groups,
        "SCALE_DTYPE": gl.float16 if matrix.scales.dtype == torch.float16 else gl.bfloat16,
        "POWER": matrix.layout.power(x.dtype),
        "ZERO_POINTS": matrix.zeros,
        "EPILOGUE": gated_epilogue(activation) if gated else PLAIN.value,
        "BIAS": bias is not None,
        "num_warps": tile.warps,
        **dependent_launch(x.device),
    }
    if compile_only:
        kernel.warmup(*arguments, grid=(1,), **constants)
    else:
        sms = num_sms(x.device)
        programs = tile.programs(weight_rows, blocks, x.shape[0], sms)
        assert not is_split or tile.can_split(weight_rows, blocks, x.shape[0], sms), f"{tile} cannot run here"
        kernel[(programs,)](*arguments, **constants)
