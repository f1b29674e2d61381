"""The first kernel of a replayed decode step that verifies drafts: fills the rows that the replay reads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_before", "count", "groups", "num_rows", "width"])
def _fill(
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
    num_before,
    count,
    groups,
    num_rows,
    width,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(given_rows + at)
    position = tl.load(given_positions + at)
    tl.store(rows + at, row)
    tl.store(positions + at, position)
    if (at >= num_before) & (at < count):
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

    given_rows, given_positions: [batch], copied to rows and positions, [at least batch]. offsets: [n], where the last
    of the n rows are draft rows: the number of drafts before each row. sources, draft_tokens: [draft rows], the row
    of each draft row's sequence, and its token. all_tables: [groups, all rows, width] int32, the block tables;
    last_tokens: [all rows]; words: [2, all rows] int64 and numbers: [4, all rows] int32, of the SamplingTable. All
    others int64. A draft row gets the blocks that its position needs.
    """
    groups, num_rows, width = all_tables.shape
    _fill[(len(given_rows),)](
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
        len(offsets) - len(sources),
        len(offsets),
        groups,
        num_rows,
        width,
        BLOCK_SIZE=block_size,
        COLUMNS=128,
    )
