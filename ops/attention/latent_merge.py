"""Merging of partial decode results over a latent cache, in a kernel of its own behind latent_decode.

A merging program has one query head of a sequence, or a chunk of its result. A sequence whose tiles lie in the range of
one program has no parts, and its merging programs end immediately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.common.launch import dependent_launch, release, wait

FEW_SEQUENCES = 16
"""Up to this many sequences are decoded by one program per multiprocessor and merged by FEW: they have many parts each.
One sequence of 65,536 tokens has 128 parts on an H200, 4 MB."""


@frozen
class MergeConfig:
    """Launch parameters of the merging kernel."""

    chunk: int
    """Numbers of a result per program."""
    parts: int
    """Parts in flight."""
    num_warps: int


FEW = MergeConfig(chunk=128, parts=64, num_warps=4)
"""For few sequences: small chunks, so that there are enough programs."""
MANY = MergeConfig(chunk=512, parts=4, num_warps=1)
"""For many sequences: small programs, since most of them end immediately."""


@frozen
class LatentWorkspace:
    """Partial results of sequences that several programs share; one workspace serves all layers, one launch at a time.

    A program's range of tiles has at most two partial sequences. Slot 0 is for a sequence that begins in an earlier
    range, slot 1 for a sequence that begins in this range.
    """

    acc: torch.Tensor
    """[programs, 2, heads, latent] float32: sums of values by softmax weight."""
    stats: torch.Tensor
    """[programs, 2, 2, heads] float32: m_i (a base-2 exponent) and l_i of each part."""

    @classmethod
    def make(cls, programs: int, num_heads: int, latent: int, device: torch.device | str) -> LatentWorkspace:
        """Allocate the workspace of launches with `programs` programs per block of heads."""
        return cls(
            torch.empty((programs, 2, num_heads, latent), dtype=torch.float32, device=device),
            torch.empty((programs, 2, 2, num_heads), dtype=torch.float32, device=device),
        )


def merge_parts(
    workspace: LatentWorkspace,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    num_sequences: int,
    block_n: int,
    block_b: int,
) -> None:
    """Write the results of the sequences that several programs share to their rows of out: [rows, heads, latent].

    context_lens: [sequences] int32; block_n: positions per tile; block_b: sequences, padded to a power of two.
    """
    programs, _, num_heads, latent = workspace.acc.shape
    config = FEW if num_sequences <= FEW_SEQUENCES else MANY
    chunk = min(config.chunk, triton.next_power_of_2(latent))
    _merge_kernel[(num_sequences, num_heads, triton.cdiv(latent, chunk))](
        workspace.acc,
        workspace.stats,
        context_lens,
        out,
        out.stride(0),
        num_sequences,
        programs,
        HEADS=num_heads,
        LATENT=latent,
        BLOCK_N=block_n,
        BLOCK_B=block_b,
        BLOCK_L=chunk,
        BLOCK_P=config.parts,
        num_warps=config.num_warps,
        **dependent_launch(out.device),
    )


@triton.jit
def divide_tiles(context_lens_ptr, num_sequences, num_programs, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """Divide the tiles of all sequences among programs: the number of tiles of each sequence, [BLOCK_B], where each
    sequence's end in the list of all tiles, their number, and the number per program."""
    offs_b = tl.arange(0, BLOCK_B)
    context_lens = tl.load(context_lens_ptr + offs_b, mask=offs_b < num_sequences, other=0)
    tile_counts = tl.cdiv(context_lens, BLOCK_N)
    num_tiles = tl.sum(tile_counts, 0)
    return tile_counts, tl.cumsum(tile_counts, 0), num_tiles, tl.cdiv(num_tiles, num_programs)


@triton.jit(do_not_specialize=["num_sequences", "num_programs"])
def _merge_kernel(
    acc_ptr,
    stats_ptr,
    context_lens_ptr,
    out_ptr,
    out_stride,
    num_sequences,
    num_programs,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    tile_counts, tile_ends, _, tiles_per_program = divide_tiles(
        context_lens_ptr, num_sequences, num_programs, BLOCK_N, BLOCK_B
    )
    is_mine = tl.arange(0, BLOCK_B) == sequence
    end = tl.sum(tl.where(is_mine, tile_ends, 0), 0)
    first_program = (end - tl.sum(tl.where(is_mine, tile_counts, 0), 0)) // tiles_per_program
    num_parts = (end - 1) // tiles_per_program - first_program + 1
    wait(PDL)
    release(PDL)
    if num_parts > 1:
        offs_l = tl.program_id(2) * BLOCK_L + tl.arange(0, BLOCK_L)
        # Finite, so that parts of padding do not compute inf - inf.
        m_i = tl.full([1], -1e30, tl.float32)
        l_i = tl.zeros([1], tl.float32)
        acc = tl.zeros([BLOCK_L], tl.float32)
        for first in range(0, num_parts, BLOCK_P):
            number = first + tl.arange(0, BLOCK_P)
            # Part 0 is in slot 1 of its program, all others are in slot 0 of theirs.
            part = (first_program + number) * 2 + (number == 0).to(tl.int32)
            part_mask = number < num_parts
            m_part = tl.load(stats_ptr + part * (2 * HEADS) + head, mask=part_mask, other=-1e30)
            l_part = tl.load(stats_ptr + part * (2 * HEADS) + HEADS + head, mask=part_mask, other=0.0)
            acc_part = tl.load(
                acc_ptr + (part * HEADS + head)[:, None] * LATENT + offs_l[None, :],
                mask=part_mask[:, None] & (offs_l < LATENT)[None, :],
                other=0.0,
            )
            m_new = tl.maximum(m_i, tl.max(m_part, 0))
            alpha = tl.exp2(m_i - m_new)
            alpha_part = tl.exp2(m_part - m_new)
            l_i = l_i * alpha + tl.sum(l_part * alpha_part, 0)
            acc = acc * alpha + tl.sum(acc_part * alpha_part[:, None], 0)
            m_i = m_new
        row = out_ptr + sequence * out_stride + head * LATENT
        tl.store(row + offs_l, (acc / l_i).to(out_ptr.dtype.element_ty), mask=offs_l < LATENT)
