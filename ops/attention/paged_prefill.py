"""Attention of stretches of prompts over the paged KV cache, in which they and their prefixes are stored already.

A tile is a stretch of one sequence's new tokens with all query heads of one KV head: these are the rows of the matrix
products, so keys and values are read once for all heads. Tiles are listed on the host (`prefill_tiles`); keys come
block by block, with online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). The kernel here runs on any GPU that
Triton knows; persistent_prefill has another for those with wgmma.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.attention import persistent_prefill
from engine.ops.attention.paged_decode import as_type, capped, score_factor
from engine.ops.common.launch import dependent_launch, has_wgmma, release, wait


@frozen(kw_only=True)
class PrefillConfig:
    """How the kernel is launched."""

    rows: int
    """Rows a tile, a row being one query head of one token; a power of two, at least 16 and the heads of a group."""
    keys: int
    """Positions at a time; a power of two, at least 16."""
    warps: int
    """Of the persistent kernel: in each of its three groups."""
    stages: int
    """Blocks of keys and values in flight or in use."""
    persistent: bool = False
    """By the kernel of persistent_prefill."""

    def tokens(self, group: int) -> int:
        """New tokens a tile, with `group` query heads each."""
        return self.rows // group


PERSISTENT = PrefillConfig(rows=128, keys=128, warps=4, stages=2, persistent=True)
"""The fastest, or nearly, of those that benchmarks/attention.py --tune tries, on an H200."""


def can_persist(keys: torch.Tensor, dtype: torch.dtype, group: int) -> bool:
    """Whether the persistent kernel takes queries of `dtype`, `group` heads a KV head, to such keys.

    keys: [..., block_size, kv_heads, head_dim].
    """
    block_size, _, head_dim = keys.shape[-3:]
    return (
        has_wgmma(keys.device)
        and keys.dtype == dtype
        and dtype.itemsize == 2
        and head_dim in persistent_prefill.HEAD_DIMS
        and block_size % persistent_prefill.RUN == 0
        and group <= PERSISTENT.rows
    )


def prefill_config(
    longest: int, group: int, head_dim: int, itemsize: int, shared_memory: int, *, persistent: bool = False
) -> PrefillConfig:
    """The launch for up to `longest` new tokens a sequence, `group` query heads a KV head, `itemsize` bytes a number.

    128 rows by 8 warps are two warp groups of Hopper's matrix instruction; short stretches, and float32, which goes
    without tensor cores, take less. Of these the first whose queries, keys and values fit into a multiprocessor's
    `shared_memory` (bytes). persistent: as `can_persist` says; that kernel is for all but short stretches.
    """
    wanted = [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)]
    if itemsize == 4:
        wanted = [(32, 32, 4, 2)]
    elif longest * group <= 64:
        wanted = wanted[2:]
    elif persistent:
        return PERSISTENT
    numbers = triton.next_power_of_2(head_dim) * itemsize
    least = max(16, triton.next_power_of_2(group))
    configs = [PrefillConfig(rows=max(rows, least), keys=keys, warps=w, stages=s) for rows, keys, w, s in wanted]
    smallest = PrefillConfig(rows=least, keys=16, warps=4, stages=2)
    room = shared_memory - 2048
    return next((one for one in configs if (one.rows + 2 * one.stages * one.keys) * numbers <= room), smallest)


def prefill_tiles(
    query_lens: npt.NDArray[np.int32], context_lens: npt.NDArray[np.int32], first: int, tokens: int
) -> npt.NDArray[np.int32]:
    """[tiles, 4]: sequence of each tile, position and row of q of its first token, and how many tokens it has, at most
    `tokens`; of the sequences from `first` on.

    Those that see the most keys come first, so that what is left at the end is short.
    """
    counts = -(-query_lens[first:] // tokens)
    sequences = np.repeat(np.arange(first, len(query_lens)), counts)
    # In each sequence 0 to count - 1.
    numbers = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = numbers * tokens
    sizes = np.minimum(query_lens[sequences] - begins, tokens)
    positions = context_lens[sequences] - query_lens[sequences] + begins
    rows = (np.cumsum(query_lens) - query_lens)[sequences] + begins
    order = np.argsort(-(positions + sizes), kind="stable")
    return np.stack([sequences, positions, rows, sizes], axis=1)[order].astype(np.int32)


def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    value_scale: float = 1.0,
    config: PrefillConfig,
) -> None:
    """Causal attention of the rows of q that the tiles cover into the same rows of out.

    q, out: [tokens, heads, head_dim], last two dimensions dense; keys, values: [blocks, block_size, kv_heads,
    head_dim]; tables: [sequences, most blocks] int32; tiles: [tiles, 4] int32, of `prefill_tiles` with
    config.tokens(group). What is in `values` counts value_scale times.
    """
    if config.persistent:
        persistent_prefill.launch(
            q,
            keys,
            values,
            tables,
            tiles,
            out,
            scale=scale,
            softcap=softcap,
            window=window,
            value_scale=value_scale,
            config=config,
        )
        return
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    _prefill_kernel[(len(tiles) * num_kv_heads,)](
        q,
        keys,
        values,
        tables,
        tiles,
        out,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        scale,
        softcap or 0.0,
        window or 0,
        value_scale,
        HEADS=num_kv_heads,
        GROUP=q.shape[1] // num_kv_heads,
        DIM=head_dim,
        PAGE=block_size,
        WINDOWED=window is not None,
        SOFTCAP=softcap is not None,
        BLOCK_ROWS=config.rows,
        BLOCK_KEYS=config.keys,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=config.warps,
        num_stages=config.stages,
        **dependent_launch(q.device),
    )


@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    tiles_ptr,
    out_ptr,
    q_stride,
    out_stride,
    table_stride,
    scale,
    softcap,
    window,
    value_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS
    wait(PDL)
    release(PDL)
    table_ptr = tables_ptr + tl.load(tiles_ptr + tile * 4).to(tl.int64) * table_stride
    # Positions of the first and the last new token in the tile; the keys before `whole` are seen by all its rows, but
    # for those that the window of its last rows leaves out, which are before `narrow`.
    oldest = tl.load(tiles_ptr + tile * 4 + 1)
    first_row = tl.load(tiles_ptr + tile * 4 + 2)
    tokens = tl.load(tiles_ptr + tile * 4 + 3)
    newest = oldest + tokens - 1

    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_DIM)
    real = rows < tokens * GROUP
    inside = real[:, None]
    if BLOCK_DIM != DIM:
        inside = inside & (columns[None, :] < DIM)
    heads = (head * GROUP + rows % GROUP)[:, None] * DIM + columns[None, :]
    token_rows = (first_row + rows // GROUP).to(tl.int64)[:, None]
    q = tl.load(q_ptr + token_rows * q_stride + heads, mask=inside, other=0.0)

    at_rows = oldest + rows // GROUP
    whole = (oldest + 1) // BLOCK_KEYS * BLOCK_KEYS
    begin = 0
    narrow = 0
    if WINDOWED:
        begin = tl.maximum(oldest + 1 - window, 0) // BLOCK_KEYS * BLOCK_KEYS
        narrow = tl.cdiv(tl.maximum(newest + 1 - window, 0), BLOCK_KEYS) * BLOCK_KEYS

    # Finite, so that a row that sees nothing of a block computes no infinity less infinity.
    top = tl.full([BLOCK_ROWS], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    keys_ptr += head * DIM
    values_ptr += head * DIM
    if WINDOWED:
        top, weight, acc = _attend(
            q, top, weight, acc, keys_ptr, values_ptr, table_ptr, at_rows, newest + 1, begin, narrow, scale, softcap,
            window, HEADS, DIM, PAGE, WINDOWED, SOFTCAP, BLOCK_KEYS, BLOCK_DIM, True,
        )  # fmt: skip
    top, weight, acc = _attend(
        q, top, weight, acc, keys_ptr, values_ptr, table_ptr, at_rows, newest + 1, narrow, whole, scale,
        softcap, window, HEADS, DIM, PAGE, WINDOWED, SOFTCAP, BLOCK_KEYS, BLOCK_DIM, False,
    )  # fmt: skip
    top, weight, acc = _attend(
        q, top, weight, acc, keys_ptr, values_ptr, table_ptr, at_rows, newest + 1, tl.maximum(narrow, whole),
        newest + 1, scale, softcap, window, HEADS, DIM, PAGE, WINDOWED, SOFTCAP, BLOCK_KEYS, BLOCK_DIM, True,
    )  # fmt: skip

    result = acc / tl.where(real, weight, 1.0)[:, None] * value_scale
    tl.store(out_ptr + token_rows * out_stride + heads, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    q,
    top,
    weight,
    acc,
    keys_ptr,
    values_ptr,
    table_ptr,
    at_rows,
    limit,
    begin,
    end,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The tile over the keys from `begin`, a multiple of BLOCK_KEYS, to `end`; without MASKED all rows see them all.

    No row sees the position `limit`, nor is it read: it may be beyond the sequence.
    """
    factor = score_factor(scale, SOFTCAP)
    offsets = tl.arange(0, BLOCK_KEYS)
    columns = tl.arange(0, BLOCK_DIM)
    # A block's pages are looked up one block early: its keys need not wait for them.
    positions = begin + offsets
    pages = tl.load(table_ptr + positions // PAGE, mask=positions < limit, other=0)
    for start in range(begin, end, BLOCK_KEYS):
        positions = start + offsets
        slots = pages.to(tl.int64) * PAGE + positions % PAGE
        following = positions + BLOCK_KEYS
        pages = tl.load(table_ptr + following // PAGE, mask=following < limit, other=0)

        at = slots[:, None] * (HEADS * DIM) + columns[None, :]
        if MASKED or BLOCK_DIM != DIM:
            inside = (positions < limit)[:, None] & (columns < DIM)[None, :]
            k = tl.load(keys_ptr + at, mask=inside, other=0.0)
            v = tl.load(values_ptr + at, mask=inside, other=0.0)
        else:
            k = tl.load(keys_ptr + at)
            v = tl.load(values_ptr + at)

        scores = tl.dot(q, tl.trans(as_type(k, q.dtype)), input_precision="ieee")
        if SOFTCAP:
            scores = capped(scores * scale, softcap)
        if MASKED:
            distance = at_rows[:, None] - positions[None, :]
            seen = distance >= 0
            if WINDOWED:
                seen = seen & (distance < window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        p = tl.exp2(scores * factor - new_top[:, None])
        fade = tl.exp2(top - new_top)
        weight = weight * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), as_type(v, q.dtype), acc * fade[:, None], input_precision="ieee")
        top = new_top
    return top, weight, acc
