"""The batch as FlashInfer's planners want it: lists of pages one after the other instead of a table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import frozen

Ints = npt.NDArray[np.int32]


@frozen
class PageLists:
    """Sequences and their pages, in the compressed sparse row format. All int32."""

    query_starts: Ints
    """[sequences + 1]: first row of q of each sequence, then the number of rows."""
    page_starts: Ints
    """[sequences + 1]: first entry of `pages` of each sequence, then their number."""
    last_lengths: Ints
    """[sequences]: tokens in the last page, 1 to block_size."""
    context_lengths: Ints
    """[sequences]: tokens in all pages."""
    pages: Ints
    """Block numbers of all sequences, end to end."""


def page_lists(query_lengths: Ints, context_lengths: Ints, tables: Ints, block_size: int) -> PageLists:
    """From new tokens [sequences], tokens in the cache [sequences] and block tables [sequences, most blocks]."""
    counts = -(-context_lengths // block_size)
    used = np.arange(tables.shape[1]) < counts[:, None]
    return PageLists(
        query_starts=_starts(query_lengths),
        page_starts=_starts(counts),
        last_lengths=context_lengths - (counts - 1) * block_size,
        context_lengths=context_lengths,
        pages=tables[used],
    )


def _starts(lengths: Ints) -> Ints:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts
