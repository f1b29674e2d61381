"""The draw path: some rows draw from their distribution (temperature, top_k, top_p, min_p), the others are greedy.

A draw inverts the cumulative distribution, in order of token number, at a uniform number. The number is a hash of the
seed and of the number of output tokens so far, so that a draw depends neither on the batch nor on preemption.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.core.sampling.arithmetic import cutoffs, draw, uniforms
from engine.core.sampling.base import CapturedTokens, SamplingPath
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.sampling.sampling_batch import DrawParams, ProcessedLogits, SamplingBatch

if TYPE_CHECKING:
    from engine.core.models.base import Model
    from engine.core.sampling.draft_rows import DraftRows
    from engine.core.sampling.greedy import GreedyPath
    from engine.core.sampling.sampling_table import SamplingTable

DrawRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
"""(logits, table rows, offsets) to (tokens, max logits): `ops.sampling.sample.draw_rows` on a SamplingTable."""


class DrawPath(SamplingPath):
    """Serves batches whose sequences are greedy or draw from unprocessed logits."""

    name = "draw"

    def __init__(
        self,
        table: SamplingTable,
        greedy: GreedyPath,
        draw_rows: DrawRows | None,
        same_on_all_ranks: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """draw_rows: a fused kernel, which may be captured in a CUDA graph; None: draw by PyTorch's operations, whose
        memory depends on the parameters. same_on_all_ranks: as in Sampler."""
        super().__init__()
        self._table = table
        self._greedy = greedy
        self._draw_rows = draw_rows
        self._same_on_all_ranks = same_on_all_ranks
        self.capturable = draw_rows is not None

    def capture(self, model: Model, hidden: torch.Tensor, table_rows: torch.Tensor) -> CapturedTokens:
        tokens, max_logits = self.draw_unprocessed(model.logits(hidden), table_rows)
        return CapturedTokens(tokens=tokens, max_logits=max_logits, table_advanced=True)

    def draw_unprocessed(
        self, logits: torch.Tensor, table_rows: torch.Tensor, drafts: DraftRows | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample by the fused kernel and advance the table; may be captured in a CUDA graph.

        logits: [rows, vocab]; table_rows: [rows] int64, the padding row any number of times. Returns (tokens [rows]
        int64, max logits [rows] float32).
        """
        assert self._draw_rows is not None
        tokens, max_logits = self._draw_rows(logits, table_rows, None if drafts is None else drafts.offsets)
        self._table.advance(table_rows)
        return self._same_on_all_ranks(tokens), max_logits

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, table_rows: torch.Tensor, drafts: DraftRows | None = None
    ) -> SampledTokens:
        tokens, max_logits = self.choose(logits, batch, table_rows, None, drafts)
        self._table.advance(table_rows if drafts is None else table_rows[: drafts.num_before])
        return SampledTokens.from_tokens(tokens, max_logits)

    def choose(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        table_rows: torch.Tensor,
        processed: ProcessedLogits | None,
        drafts: DraftRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [rows] int64 that all ranks agree on, max logits [rows] float32, as in `SampledTokens.from_tokens`).

        processed: logits that take the place of some rows; None: no row has any. drafts: the last rows; None: no row
        verifies drafts.
        """
        offsets = None if drafts is None else drafts.offsets
        tokens, max_logits = self._choose_on_this_rank(logits, batch, table_rows, processed, offsets)
        return self._same_on_all_ranks(tokens), max_logits

    def _choose_on_this_rank(
        self,
        logits: torch.Tensor,
        batch: SamplingBatch,
        table_rows: torch.Tensor,
        processed: ProcessedLogits | None,
        offsets: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """offsets: [rows] int64, outputs between `SamplingTable.num_outputs` and each row; None: 0 for all."""
        if self._draw_rows is not None:
            if processed is None:
                return self._draw_rows(logits, table_rows, offsets)
            # Processed rows are drawn below; here they count as greedy padding, which costs the least.
            others = table_rows.index_fill(0, processed.rows, self._table.padding_row)
            tokens, max_logits = self._draw_rows(logits, others, offsets)
            own_rows = table_rows[processed.rows]
            own_offsets = None if offsets is None else offsets[processed.rows]
            tokens[processed.rows], processed_max_logits = self._draw_rows(processed.logits, own_rows, own_offsets)
            max_logits[processed.rows] += processed_max_logits  # finite if both are
            return tokens, max_logits
        tokens, max_logits = self._greedy.choose(logits, processed)
        if (params := batch.draw) is not None:
            drawing = logits[params.rows].float()
            if processed is not None and params.processed is not None:
                among_drawing, among_processed = params.processed
                drawing[among_drawing] = processed.logits[among_processed]
            num_outputs = self._table.num_outputs[table_rows[params.rows]]
            if offsets is not None:
                num_outputs += offsets[params.rows]
            tokens[params.rows] = draw_plain(drawing, params, num_outputs)
        return tokens, max_logits


def draw_plain(logits: torch.Tensor, params: DrawParams, num_outputs: torch.Tensor) -> torch.Tensor:
    """Apply temperature, top_k, top_p and min_p, and draw, by PyTorch's operations: [rows that draw] int64.

    logits: [rows that draw, vocab] float32; num_outputs: [rows that draw] int64, output tokens before.
    """
    return draw(kept_scores(logits, params), uniforms(params.keys, num_outputs))


def kept_scores(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Apply temperature, top_k, top_p and min_p: [rows that draw, vocab] float32, -inf where a token is ruled out.

    logits: [rows that draw, vocab] float32.
    """
    # The most likely token scores 0: no temperature can make the scores overflow, and min_p is a plain bound.
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / params.temperature
    min_score = torch.full_like(params.temperature, -float("inf")) if params.log_min_p is None else params.log_min_p
    for group in params.cutoffs:
        found = cutoffs(scores[group.members], group.top_k, group.top_p, group.max_top_k)
        min_score = min_score.index_copy(0, group.members, torch.maximum(min_score[group.members], found))
    if params.cutoffs or params.log_min_p is not None:
        scores = scores.masked_fill(scores < min_score, -float("inf"))
    return scores
