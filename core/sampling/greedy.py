"""The greedy path: each row's most likely token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.core.sampling.base import CapturedTokens, SamplingPath
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.sampling.sampling_batch import ProcessedLogits, SamplingBatch

if TYPE_CHECKING:
    from engine.core.layers.lm_head import Argmax
    from engine.core.models.base import Model
    from engine.core.sampling.draft_rows import DraftRows
    from engine.core.sampling.sampling_table import SamplingTable


class GreedyPath(SamplingPath):
    """Serves batches whose sequences all take the most likely token of unprocessed logits."""

    name = "greedy"

    def __init__(self, table: SamplingTable, argmax: Argmax) -> None:
        super().__init__()
        self._table = table
        self._argmax = argmax

    def capture(self, model: Model, hidden: torch.Tensor, table_rows: torch.Tensor) -> CapturedTokens:
        max_logits, tokens = model.greedy(hidden)
        return CapturedTokens(tokens=tokens, max_logits=max_logits, table_advanced=False)

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, table_rows: torch.Tensor, drafts: DraftRows | None = None
    ) -> SampledTokens:
        tokens, max_logits = self.choose(logits, None)
        self._table.advance(table_rows if drafts is None else table_rows[: drafts.num_before])
        return SampledTokens.from_tokens(tokens, max_logits)

    def choose(self, logits: torch.Tensor, processed: ProcessedLogits | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens [rows] int64, max logits [rows] float32, as in `SampledTokens.from_tokens`).

        processed: logits that take the place of some rows; None: no row has any.
        """
        max_logits, tokens = self._argmax(logits)
        if processed is not None:
            processed_max_logits, tokens[processed.rows] = self._argmax(processed.logits)
            max_logits[processed.rows] += processed_max_logits  # finite if both are
        return tokens, max_logits
