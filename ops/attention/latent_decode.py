"""Decode attention over a latent cache: one query per sequence, in two kernels without a host-side plan.

The work is divided as in paged_decode: a list of tiles, BLOCK_N consecutive key positions of a sequence, all sequences
in order, of which each program has an equal contiguous range. One captured CUDA graph therefore suits every batch. The
results are wide (a latent per query head), so one program would take long to merge the parts of a long context. A
second kernel (latent_merge) merges them, with at least a program per query head.

Both products are transposed, S^T = K q^T and acc^T = V^T p^T, so that M is the keys, or the latent's dimensions:
Hopper's matrix instruction has an M of at least 64, and a token has few heads.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.attention.latent_loads import load_block_ids, load_keys, load_queries, padded_key
from engine.ops.attention.latent_merge import FEW_SEQUENCES, LatentWorkspace, divide_tiles, merge_parts
from engine.ops.attention.paged_decode import pad_sequences
from engine.ops.common.launch import dependent_launch, num_sms, release, wait

MAX_ROWS = 64
"""Maximum query heads per program."""


@frozen(kw_only=True)
class LatentDecodeConfig:
    """Launch parameters of the decode kernel."""

    block_m: int
    """Query heads per program; a power of two, at least 16."""
    block_n: int
    """Key positions per tile; a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Tiles of keys in flight or in use."""
    programs_per_sm: int
    """Programs per multiprocessor, whose shared memory must hold the tiles of all of them."""

    def make_workspace(self, num_heads: int, latent: int, device: torch.device) -> LatentWorkspace:
        """The workspace of launches on `device`, for as many programs as run there concurrently."""
        head_blocks = -(-num_heads // self.block_m)
        programs = max(1, num_sms(device) * self.programs_per_sm // head_blocks)
        return LatentWorkspace.make(programs, num_heads, latent, device)


def latent_decode_configs(
    num_heads: int, key_bytes: int, itemsize: int, shared_memory: int
) -> tuple[tuple[float, LatentDecodeConfig], ...]:
    """List (maximum number of sequences, launch parameters), smallest batches first.

    Few sequences have one program per multiprocessor, which leaves half as many parts to merge; many have two, which
    hide each other's latency. On an H200 one sequence of 65,536 tokens takes 36 us with one and 42 us with two; 32
    sequences of 8192 tokens take 119 us and 95 us.

    key_bytes: bytes of a cached key, its parts padded to powers of two; itemsize: bytes per number; shared_memory:
    bytes per multiprocessor.
    """
    block_m = 16 if itemsize == 4 else max(16, min(MAX_ROWS, triton.next_power_of_2(num_heads)))
    warps = 4 if block_m == 16 else 8
    tiles = [(32, warps, 4), (32, warps, 3), (32, warps, 2), (16, warps, 2)]
    if itemsize == 4:  # without tensor cores
        tiles = [(16, 4, 2)]

    def config(block_n: int, num_warps: int, num_stages: int, programs_per_sm: int) -> LatentDecodeConfig:
        return LatentDecodeConfig(
            block_m=block_m,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            programs_per_sm=programs_per_sm,
        )

    def fits(config: LatentDecodeConfig) -> bool:
        keys = (config.num_stages - 1) * config.block_n
        return config.programs_per_sm * ((block_m + keys) * key_bytes + 3072) <= shared_memory

    few = [config(*tile, programs_per_sm=1) for tile in tiles]
    many = [config(*tile, programs_per_sm=2) for tile in tiles if warps == 4]  # 8 warps would lack registers
    smallest = few[-1]
    return (
        (FEW_SEQUENCES, next(filter(fits, few), smallest)),
        (math.inf, next(filter(fits, [*many, *few]), smallest)),
    )


def latent_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    num_sequences: int,
    scale: float,
    workspace: LatentWorkspace,
    config: LatentDecodeConfig,
) -> None:
    """Compute attention for the first `num_sequences` rows of q into the same rows of out.

    q: [rows, heads, latent + rotated], last two dimensions dense;
    cache: [blocks, block_size, 1, latent + rotated], dense;
    tables: [sequences, max_blocks] int32;
    context_lens: [sequences] int32, at least 1: number of positions that the query sees, its own (the last) included;
    out: [rows, heads, latent], last two dimensions dense.
    """
    num_heads, latent = out.shape[1:]
    programs, block_b = len(workspace.acc), pad_sequences(num_sequences)
    block_l, block_r = padded_key(latent, q.shape[2] - latent)
    _decode_kernel[(programs * triton.cdiv(num_heads, config.block_m),)](
        q,
        cache,
        tables,
        context_lens,
        out,
        workspace.acc,
        workspace.stats,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        num_sequences,
        programs,
        scale,
        HEADS=num_heads,
        LATENT=latent,
        ROTATED=q.shape[2] - latent,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_B=block_b,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_L=block_l,
        BLOCK_R=block_r,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(q.device),
    )
    merge_parts(workspace, context_lens, out, num_sequences=num_sequences, block_n=config.block_n, block_b=block_b)


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "num_programs"])
def _decode_kernel(
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    acc_ptr,
    stats_ptr,
    q_stride,
    out_stride,
    table_stride,
    num_sequences,
    num_programs,
    scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    # Heads change fastest: programs that run together read the same keys.
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0) // HEAD_BLOCKS
    heads = tl.program_id(0) % HEAD_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    head_mask = heads < HEADS
    tile_counts, tile_ends, num_tiles, tiles_per_program = divide_tiles(
        context_lens_ptr, num_sequences, num_programs, BLOCK_N, BLOCK_B
    )
    range_start = program * tiles_per_program
    range_end = tl.minimum(range_start + tiles_per_program, num_tiles)
    precedes = tile_ends <= range_start
    first_sequence = tl.sum(precedes.to(tl.int32), 0)
    # Index in the list of the current sequence's first tile.
    tile_offset = tl.sum(tl.where(precedes, tile_counts, 0), 0)
    last_sequence = tl.sum((tile_ends < range_end).to(tl.int32), 0)
    wait(PDL)  # context_lens may be read before: see ops/common/launch.py
    release(PDL)
    if range_start < num_tiles:
        offs_l = tl.arange(0, BLOCK_L)
        result_mask = head_mask[:, None] & (offs_l < LATENT)[None, :]
        offs_result = heads[:, None] * LATENT + offs_l[None, :]
        for sequence in range(first_sequence, last_sequence + 1):
            context_len = tl.load(context_lens_ptr + sequence)
            tile_count = tl.cdiv(context_len, BLOCK_N)
            start = tl.maximum(range_start - tile_offset, 0)
            stop = tl.minimum(range_end - tile_offset, tile_count)

            q_latent, q_rotated = load_queries(
                q_ptr + sequence * q_stride, heads * (LATENT + ROTATED), head_mask,
                LATENT, ROTATED, BLOCK_L, BLOCK_R,
            )  # fmt: skip
            acc, m_i, l_i = _attend(
                q_latent, q_rotated, cache_ptr, block_tables_ptr + sequence * table_stride, start, stop, context_len,
                scale, LATENT, ROTATED, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_L, BLOCK_R,
            )  # fmt: skip
            if (start == 0) & (stop == tile_count):
                result = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + sequence * out_stride + offs_result, result, mask=result_mask)
            else:
                part = program * 2 + (start == 0).to(tl.int32)
                tl.store(acc_ptr + part * (HEADS * LATENT) + offs_result, acc, mask=result_mask)
                tl.store(stats_ptr + part * (2 * HEADS) + heads, m_i, mask=head_mask)
                tl.store(stats_ptr + part * (2 * HEADS) + HEADS + heads, l_i, mask=head_mask)
            tile_offset += tile_count


@triton.jit
def _attend(
    q_latent,
    q_rotated,
    cache_ptr,
    block_table_ptr,
    first_tile,
    end_tile,
    context_len,
    scale,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attend to one sequence's tiles [first_tile, end_tile); return acc, [BLOCK_M, BLOCK_L], m_i and l_i."""
    factor = scale * 1.4426950408889634
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # One sum per position of a tile: threads add them up after the loop instead of in each iteration.
    l_i = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_L, BLOCK_M], tl.float32)
    # Cache blocks are looked up one iteration early, so that loads of keys do not wait for the block table.
    k_positions = first_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    block_ids = load_block_ids(block_table_ptr, k_positions, context_len, BLOCK_SIZE)
    for tile in range(first_tile, end_tile):
        k_positions = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k_latent, k_rotated = load_keys(
            cache_ptr, block_ids, k_positions, context_len, LATENT, ROTATED, BLOCK_SIZE, BLOCK_L, BLOCK_R
        )
        block_ids = load_block_ids(block_table_ptr, k_positions + BLOCK_N, context_len, BLOCK_SIZE)

        qk = tl.dot(k_latent, tl.trans(q_latent), input_precision="ieee")
        qk = tl.dot(k_rotated, tl.trans(q_rotated), qk, input_precision="ieee")
        qk = tl.where((k_positions < context_len)[:, None], qk, float("-inf"))

        # Every tile has a visible position, so m_new is finite.
        m_new = tl.maximum(m_i, tl.max(qk, 0) * factor)
        p = tl.exp2(qk * factor - m_new[None, :])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha[None, :] + p
        acc = tl.dot(tl.trans(k_latent), p.to(k_latent.dtype), acc * alpha[None, :], input_precision="ieee")
        m_i = m_new
    return tl.trans(acc), m_i, tl.sum(l_i, 0)
