"""Merging of partial decode results: sequences whose keys several programs share (split-KV, "Flash-Decoding").

Each program writes the acc, m_i and l_i of its part to the workspace. The program that finishes a sequence's last part
rescales all parts to a common maximum and adds them up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.attention.common import add_sinks
from engine.ops.attention.paged_decode_config import DecodeConfig


@frozen
class DecodeWorkspace:
    """Partial results of sequences that several programs share; one workspace serves all layers, one launch at a time.

    A program's range of tiles has at most two partial sequences. Slot 0 is for a sequence that begins in an earlier
    range, slot 1 for a sequence that begins in this range.
    """

    acc: torch.Tensor
    """[programs, 2, kv_heads, group, head_dim] float32: sums of values by softmax weight."""
    stats: torch.Tensor
    """[programs, 2, kv_heads, 2, group] float32: m_i (a base-2 exponent) and l_i of each part."""
    arrivals: torch.Tensor
    """[programs, kv_heads] int32: number of parts written of the sequence that begins in a program's range and goes on
    in the next; 0 between launches."""

    @classmethod
    def make(
        cls, programs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | str
    ) -> DecodeWorkspace:
        """Allocate the workspace of launches with `programs` programs per KV head, or per folded KV head."""
        group = num_heads // num_kv_heads
        return cls(
            torch.empty((programs, 2, num_kv_heads, group, head_dim), dtype=torch.float32, device=device),
            torch.empty((programs, 2, num_kv_heads, 2, group), dtype=torch.float32, device=device),
            torch.zeros((programs, num_kv_heads), dtype=torch.int32, device=device),
        )


def merge_size(group: int, head_dim: int, config: DecodeConfig) -> int:
    """Number of parts in flight in `merge_parts`, a power of two: at most half of a thread's registers."""
    part: int = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    room: int = config.max_registers() // 2 * 32 * config.num_warps
    return max(1, min(16, 1 << (room // part).bit_length() - 1 if room >= part else 1))


@triton.jit
def merge_parts(
    acc_ptr,
    stats_ptr,
    result_ptr,
    sinks_ptr,
    first_program,
    num_parts,
    head,
    value_scale,
    KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_SIZE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the parts of one sequence and KV head without exchange between warps, MERGE_SIZE parts in flight.

    Each thread reads its own elements of all parts.
    """
    offs_g = tl.arange(0, BLOCK_G)
    offs_d = tl.arange(0, BLOCK_D)
    row_mask = offs_g < GROUP_SIZE
    offs = offs_g[:, None] * HEAD_DIM + offs_d[None, :]
    # Finite, so that padding rows do not compute inf - inf.
    m_i = tl.full([BLOCK_G], -1e30, tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(0, num_parts, MERGE_SIZE):
        # All loads come first, so that they take the time of one.
        parts = ()
        for i in tl.static_range(MERGE_SIZE):
            part = _part(first_program, start + i, head, KV_HEADS)
            mask = row_mask & (start + i < num_parts)
            m_ptr = stats_ptr + part * 2 * GROUP_SIZE + offs_g
            # .cg bypasses the L1 cache, which does not see other programs' stores.
            m_part = tl.load(m_ptr, mask=mask, other=-1e30, cache_modifier=".cg")
            l_part = tl.load(m_ptr + GROUP_SIZE, mask=mask, other=1.0, cache_modifier=".cg")
            acc_part = tl.load(
                acc_ptr + part * (GROUP_SIZE * HEAD_DIM) + offs,
                mask=mask[:, None] & (offs_d < HEAD_DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            parts = parts + ((m_part, l_part, acc_part),)  # type: ignore[assignment] # noqa: RUF005
        m_new = m_i
        for i in tl.static_range(MERGE_SIZE):
            m_new = tl.maximum(m_new, parts[i][0])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha
        acc = acc * alpha[:, None]
        for i in tl.static_range(MERGE_SIZE):
            alpha_part = tl.exp2(parts[i][0] - m_new)
            l_i += parts[i][1] * alpha_part
            acc += parts[i][2] * alpha_part[:, None]
        m_i = m_new
    if SINKS:
        l_i = add_sinks(l_i, m_i, sinks_ptr + head * GROUP_SIZE, offs_g, GROUP_SIZE)
    result = (acc / l_i[:, None] * value_scale).to(result_ptr.dtype.element_ty)
    tl.store(
        result_ptr + offs_g[:, None] * HEAD_DIM + offs_d[None, :],
        result,
        mask=(offs_g < GROUP_SIZE)[:, None] & (offs_d < HEAD_DIM)[None, :],
    )


@triton.jit
def _part(first_program, number, head, KV_HEADS: tl.constexpr):
    """Workspace index of part `number` of a sequence that begins in the range of `first_program`.

    Part 0 is in slot 1 of its program, all others are in slot 0 of theirs.
    """
    return ((first_program + number) * 2 + 1 - tl.minimum(number, 1)) * KV_HEADS + head
