"""The batch of a replayed decode step that verifies drafts: from the step to the rows that the replay reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from attrs import frozen

from engine.core.runner.graph_capture import GraphCapturer
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.sampling.draft_rows import DraftRows
from engine.core.sampling.sampling_table import SamplingTable
from engine.core.transfer import to_device
from engine.core.types import Step

_COLUMNS = ("rows", "positions", "sources", "tokens", "offsets", "first", "table_rows")
"""What is sent per row of the batch, per draft row, or per draft slice."""
_VIEWS_KEPT = 256
_LEAST_CHANGES = 64
"""Minimum room in the buffer for changed entries of block tables."""


@frozen(kw_only=True)
class _Views:
    """What was sent, for one shape of a batch: views of the buffer on the device."""

    drafts: torch.Tensor
    first: torch.Tensor
    table_rows: torch.Tensor
    offsets: torch.Tensor
    sources: torch.Tensor


class DraftBatch:
    """Sends the batches of steps with drafts, each before the replay that computes it.

    The device is idle meanwhile, since drafts follow the newest tokens. So a batch and the new entries of block tables
    go through a permanent buffer, in one transfer, and on a GPU a separate CUDA graph sends them and fills the rows.
    The next step with drafts overwrites the buffer; it is planned only after the result of this step.
    """

    def __init__(
        self,
        persistent_batch: PersistentBatch,
        table: SamplingTable,
        *,
        rows: torch.Tensor,
        positions: torch.Tensor,
        max_drafts: int,
        fused: bool,
    ) -> None:
        """rows, positions: [max rows] int64, what replays read. max_drafts: of one slice. fused: fill the rows by one
        Triton kernel instead of PyTorch's operations."""
        self._persistent_batch = persistent_batch
        self._table = table
        self._rows, self._positions = rows, positions
        self._max_rows = len(rows)
        self._fused = fused
        width = -(-self._max_rows // 2) * 2  # of 16 bytes: kernels read whole vectors
        starts = {name: 4 + at * width for at, name in enumerate(_COLUMNS)}
        drafts = 4 + len(_COLUMNS) * width
        entries = drafts + width * max_drafts
        self._max_changes = max_changes = max(width, _LEAST_CHANGES)
        blocks, end = entries + max_changes, entries + 2 * max_changes
        device = rows.device
        on_gpu = device.type == "cuda"
        self._sent = torch.zeros(end, dtype=torch.int64, pin_memory=on_gpu)
        self._received = torch.zeros_like(self._sent, device=device) if on_gpu else self._sent
        values = self._sent.numpy()
        self._host_sizes, self._host_drafts = values[:4], values[drafts:entries]
        self._host = {name: values[start : start + width] for name, start in starts.items()}
        self._host_entries, self._host_blocks = values[entries:blocks], values[blocks:]
        self._sizes, self._drafts = self._received[:4], self._received[drafts:entries]
        self._device = {name: self._received[start : start + width] for name, start in starts.items()}
        self._entries, self._blocks = self._received[entries:blocks], self._received[blocks:]
        self._views = lru_cache(_VIEWS_KEPT)(partial(_make_views, self._drafts, self._device))
        self._replay: Callable[[], None] | None = None

    def capture(self, capturer: GraphCapturer) -> None:
        """Capture the transfer and the kernel that fills the rows in a CUDA graph."""
        self._host_sizes[:] = 0
        self._replay, _ = capturer.capture(self._send_and_fill, self._send_and_fill)

    def send(self, step: Step, size: int) -> tuple[DraftRows, torch.Tensor]:
        """Fill the first `size` rows: those of `step.decodes`, one for each token of each draft slice, then padding.

        A draft row gets the block tables and sampling parameters of its sequence, and its own token.
        Returns the rows of the drafts, and the row of the sequence of each draft row: [draft rows] int64; both on the
        device, until the next call.
        """
        plain, counts = len(step.decodes), tuple([len(part.tokens) for part in step.drafts])
        self._write(step, size, counts)
        if self._replay is not None:
            self._replay()
        else:
            self._send_and_fill()
        views = self._views(plain, step.decode_rows, len(counts), max(counts) - 1)
        draft_rows = DraftRows(
            num_before=plain,
            slices=step.drafts,
            counts=counts,
            drafts=views.drafts,
            first=views.first,
            table_rows=views.table_rows,
            offsets=views.offsets,
        )
        return draft_rows, views.sources

    def _write(self, step: Step, size: int, counts: Sequence[int]) -> None:
        """Write a batch, whose decodes then count as computed, and new entries of block tables to the host's buffer.

        counts: tokens of each slice.
        """
        batch, plain = self._persistent_batch, len(step.decodes)
        rows = [batch.row(sequence) for sequence in step.decodes]
        positions: list[int] = batch.computed[rows].tolist() if rows else []
        if rows:
            batch.computed[rows] += 1
        width = max(counts) - 1
        owners: list[int] = []
        first: list[int] = []
        sources: list[int] = []
        tokens: list[int] = []
        drafts: list[int] = []
        offsets = [0] * plain
        for part, count in zip(step.drafts, counts, strict=True):
            row = batch.row(part.sequence)
            owners.append(row)
            first.append(len(offsets))
            sources += [row] * count
            tokens += part.tokens
            offsets += range(count)
            positions += range(part.start, part.start + count)
            drafts += part.tokens[1:]
            drafts += [-1] * (width + 1 - count)
        count = len(offsets)
        rows += batch.draft_rows[: count - plain]
        rows += [batch.padding_row] * (size - count)
        positions += [0] * (size - count)
        host = self._host
        self._host_sizes[:] = (size, plain, count, self._write_changes())
        for name, column in zip(_COLUMNS, (rows, positions, sources, tokens, offsets, first, owners), strict=True):
            host[name][: len(column)] = column
        self._host_drafts[: len(drafts)] = drafts

    def _write_changes(self) -> int:
        """Write the new entries of the block tables to the buffer; return their number. If they do not all fit, send
        them directly and return 0."""
        changes = self._persistent_batch.take_changes()
        if not changes:
            return 0
        entries, blocks = changes
        count = len(entries)
        if count > self._max_changes:
            self._persistent_batch.apply(to_device(changes, self._received.device))
            return 0
        self._host_entries[:count] = entries
        self._host_blocks[:count] = blocks
        return count

    def _send_and_fill(self) -> None:
        if self._received is not self._sent:
            self._received.copy_(self._sent, non_blocking=True)
        batch, table, sent = self._persistent_batch, self._table, self._device
        if self._fused:
            from engine.ops.sampling.draft_step import fill_draft_rows, write_blocks

            write_blocks(self._sizes[3:], self._entries, self._blocks, batch.group_tables)
            fill_draft_rows(
                self._sizes[:3],
                sent["rows"],
                sent["positions"],
                sent["sources"],
                sent["tokens"],
                sent["offsets"],
                rows=self._rows,
                positions=self._positions,
                all_tables=batch.group_tables,
                last_tokens=batch.last_tokens,
                words=table.words,
                numbers=table.numbers,
                block_size=batch.block_size,
            )
            return
        size, plain, count, changes = self._host_sizes.tolist()
        if changes:
            batch.apply([self._entries[:changes], self._blocks[:changes].int()])
        self._rows[:size].copy_(sent["rows"][:size])
        self._positions[:size].copy_(sent["positions"][:size])
        targets, sources = self._rows[plain:count], sent["sources"][: count - plain]
        batch.copy_rows(targets, sources, sent["tokens"][: count - plain])
        table.copy_rows(targets, sources, sent["offsets"][plain:count])


def _make_views(
    drafts: torch.Tensor, columns: Mapping[str, torch.Tensor], plain: int, count: int, slices: int, width: int
) -> _Views:
    """The views for one shape of a batch. drafts, columns: what was sent, on the device."""
    return _Views(
        drafts=drafts[: slices * width].view(slices, width),
        first=columns["first"][:slices],
        table_rows=columns["table_rows"][:slices],
        offsets=columns["offsets"][:count],
        sources=columns["sources"][: count - plain],
    )
