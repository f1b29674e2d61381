"""The first kernels of a replayed decode step that verifies drafts: they fill the rows that the replay reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHANGES = 256
"""Entries of block tables that one program writes."""


@triton.jit
def _write(count, entries, blocks, tables, CHANGES: tl.constexpr):
    at = tl.program_id(0) * CHANGES + tl.arange(0, CHANGES)
    inside = at < tl.load(count)
    tl.store(tables + tl.load(entries + at, mask=inside), tl.load(blocks + at, mask=inside), mask=inside)


def write_blocks(count: torch.Tensor, entries: torch.Tensor, blocks: torch.Tensor, tables: torch.Tensor) -> None:
    """Store blocks in block tables.

    count: [1] int64, how many of the first entries and blocks to store. entries: [n] int64, indices into the
    flattened tables; blocks: [n] int64; tables: of any shape, contiguous, int32.
    """
    _write[(triton.cdiv(len(entries), _CHANGES),)](count, entries, blocks, tables, CHANGES=_CHANGES)


@triton.jit
def _fill(
    sizes,
    given_rows,
    given_positions,
    sources,
    draft_tokens,
    offsets,
    rows,
    positions,
    all_tables,
    last_tokens,
    words,
    numbers,
    groups,
    num_rows,
    width,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    at = tl.program_id(0)
    if at < tl.load(sizes):
        row = tl.load(given_rows + at)
        position = tl.load(given_positions + at)
        tl.store(rows + at, row)
        tl.store(positions + at, position)
        num_before = tl.load(sizes + 1)
        if (at >= num_before) & (at < tl.load(sizes + 2)):
            source = tl.load(sources + at - num_before)
            tl.store(last_tokens + row, tl.load(draft_tokens + at - num_before))
            tl.store(words + row, tl.load(words + source))
            tl.store(words + num_rows + row, tl.load(words + num_rows + source) + tl.load(offsets + at))
            columns = tl.arange(0, 4) * num_rows
            tl.store(numbers + columns + row, tl.load(numbers + columns + source))
            last = position // BLOCK_SIZE
            table = all_tables
            for _ in range(groups):
                for start in range(0, last + 1, COLUMNS):
                    column = start + tl.arange(0, COLUMNS)
                    inside = column <= last
                    blocks = tl.load(table + source * width + column, mask=inside)
                    tl.store(table + row * width + column, blocks, mask=inside)
                table += num_rows * width


def fill_draft_rows(
    sizes: torch.Tensor,
    given_rows: torch.Tensor,
    given_positions: torch.Tensor,
    sources: torch.Tensor,
    draft_tokens: torch.Tensor,
    offsets: torch.Tensor,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    all_tables: torch.Tensor,
    last_tokens: torch.Tensor,
    words: torch.Tensor,
    numbers: torch.Tensor,
    block_size: int,
) -> None:
    """Store the rows and positions of a batch, and give its draft rows the state of their sequences.

    sizes: [3], the number of rows of the batch, of rows before the draft rows, and of rows before the padding. The
    other inputs have room for the largest batch; a batch uses their first elements. given_rows, given_positions: by row
    of the batch, to be copied to rows and positions. offsets: by row, the number of drafts before it. sources,
    draft_tokens: by draft row, the row of its sequence, and its token. All int64. all_tables: [groups, all rows, width]
    int32, the block tables; last_tokens: [all rows] int64; words: [2, all rows] int64 and numbers: [4, all rows] int32,
    of the SamplingTable. A draft row gets the blocks that its position needs.
    """
    groups, num_rows, width = all_tables.shape
    _fill[(len(rows),)](
        sizes,
        given_rows,
        given_positions,
        sources,
        draft_tokens,
        offsets,
        rows,
        positions,
        all_tables,
        last_tokens,
        words,
        numbers,
        groups,
        num_rows,
        width,
        BLOCK_SIZE=block_size,
        COLUMNS=128,
    )
