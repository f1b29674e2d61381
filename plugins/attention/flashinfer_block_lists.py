"""Converts block tables to the page lists (compressed sparse rows) that FlashInfer's wrappers plan from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import frozen

Ints = npt.NDArray[np.int32]


@frozen
class PageLists:
    """Sequences and their blocks, which FlashInfer calls pages, as compressed sparse rows. All int32."""

    query_starts: Ints
    """[sequences + 1]: first row of q of each sequence, then the number of rows."""
    page_starts: Ints
    """[sequences + 1]: index of each sequence's first entry in `pages`, then the number of entries."""
    last_lengths: Ints
    """[sequences]: tokens in the last block, 1 to block_size."""
    context_lengths: Ints
    """[sequences]: tokens in the blocks that are listed."""
    pages: Ints
    """Block numbers of all sequences, concatenated."""


def page_lists(
    query_lengths: Ints, context_lengths: Ints, tables: Ints, block_size: int, window: int | None = None
) -> PageLists:
    """Build the lists from new tokens [sequences], context lengths [sequences] and tables [sequences, max_blocks].

    Blocks wholly behind the sliding window are not in the lists, nor in the lengths: the kernels would load some of
    them and give them a weight of 0, which does not cancel a NaN, and such a block may be another sequence's. Windows
    count back from each query and queries are a sequence's last tokens, so a shorter context changes nothing else.
    """
    counts = -(-context_lengths // block_size)
    columns = np.arange(tables.shape[1])
    used = columns < counts[:, None]
    if window is not None:
        hidden = np.maximum(context_lengths - query_lengths + 1 - window, 0) // block_size
        used &= columns >= hidden[:, None]
        counts, context_lengths = counts - hidden, context_lengths - hidden * block_size
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
