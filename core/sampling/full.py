"""The full path: logits processors before a token is chosen, and log probabilities of the tokens chosen.

The mask of a grammar comes last, so that no bias lets a token through.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from engine.core.sampling.arithmetic import apply_masks, penalize, row_logprobs
from engine.core.sampling.base import SamplingPath
from engine.core.sampling.sampled_tokens import RowLogprobs, SampledTokens
from engine.core.sampling.sampling_batch import (
    GrammarRows,
    LogitsProcessors,
    LogprobsRequest,
    Penalties,
    ProcessedLogits,
    SamplingBatch,
)

if TYPE_CHECKING:
    from engine.core.models.base import Model
    from engine.core.sampling.draft_rows import DraftRows
    from engine.core.sampling.draw import DrawPath
    from engine.core.sampling.grammar_masks import GrammarMasks
    from engine.core.sampling.greedy import GreedyPath
    from engine.core.sampling.sampling_table import SamplingTable
    from engine.core.sampling.token_counts import TokenCounts


MAX_ROWS = 256
"""Rows that penalties and masks are applied to at a time, which bounds their memory next to the logits."""


class FullPath(SamplingPath):
    """Serves every batch: logit_bias, min_tokens, penalties, grammars and logprobs too.

    Only rows that ask for logits processors are copied as float32 and processed.
    """

    name = "full"

    def __init__(
        self,
        table: SamplingTable,
        token_counts: TokenCounts,
        grammar_masks: GrammarMasks,
        greedy: GreedyPath,
        draw: DrawPath,
    ) -> None:
        super().__init__()
        self._grammar_masks = grammar_masks
        self._table = table
        self._token_counts = token_counts
        self._greedy = greedy
        self._draw = draw

    def capture(self, model: Model, hidden: torch.Tensor, table_rows: torch.Tensor) -> torch.Tensor:
        return model.logits(hidden)

    def sample(
        self, logits: torch.Tensor, batch: SamplingBatch, table_rows: torch.Tensor, drafts: DraftRows | None = None
    ) -> SampledTokens:
        processors = batch.processors
        processed = grammar = masks = None
        if processors is not None:
            chosen = self._process(logits[processors.rows].float(), processors, table_rows[processors.rows], drafts)
            if (grammar := processors.grammar) is not None:
                masks = self._grammar_masks.fill(grammar.sequences, drafts)
                _mask(chosen, grammar, masks)
            processed = ProcessedLogits(rows=processors.rows, logits=chosen)
        if batch.draws:
            tokens, max_logits = self._draw.choose(logits, batch, table_rows, processed, drafts)
        else:
            tokens, max_logits = self._greedy.choose(logits, processed)
        if processors is not None and processors.penalties is not None:
            self._count(processors.penalties, tokens[processors.rows], drafts)
        self._table.advance(table_rows if drafts is None else table_rows[: drafts.num_before])
        logprobs = None if batch.logprobs is None else _logprobs(logits, tokens, batch.logprobs, masks)
        sampled = SampledTokens.from_tokens(tokens, max_logits, logprobs)
        if grammar is not None:
            self._grammar_masks.note(grammar, sampled, drafts)
        return sampled

    def _process(
        self, logits: torch.Tensor, processors: LogitsProcessors, table_rows: torch.Tensor, drafts: DraftRows | None
    ) -> torch.Tensor:
        """Apply bias, min_tokens and penalties; logits: [processed rows, vocab] float32, overwritten; table_rows:
        [processed rows]."""
        if (bias := processors.bias) is not None:
            place = (bias.rows, bias.tokens)
            logits.index_put_(place, logits[place] + bias.values)
        if (banned := processors.banned) is not None:
            place = (banned.rows, banned.tokens)
            num_outputs = self._table.num_outputs[table_rows[banned.rows]]
            if drafts is not None:
                num_outputs += drafts.offsets[processors.rows][banned.rows]
            early = num_outputs < banned.min_tokens
            logits.index_put_(place, logits[place].masked_fill(early, -float("inf")))
        if (penalties := processors.penalties) is not None:
            for part in _parts(len(penalties.host_rows)):
                rows, slots = penalties.rows[part], penalties.slots[part]
                if drafts is None:
                    seen, counts = self._token_counts.seen[slots], self._token_counts.counts[slots]
                else:
                    tokens = drafts.before(penalties.slices[part], processors.rows[rows])
                    seen, counts = self._token_counts.after(slots, tokens)
                strengths = penalties.repetition[part], penalties.presence[part], penalties.frequency[part]
                logits[rows] = penalize(logits[rows], seen, counts, *strengths)
        return logits

    def _count(self, penalties: Penalties, tokens: torch.Tensor, drafts: DraftRows | None) -> None:
        """Count the tokens of rows that verify no drafts. tokens: [processed rows] int64."""
        slots, rows = penalties.slots, penalties.rows
        if drafts is not None:
            plain = bisect_left(penalties.host_rows, drafts.num_before)
            slots, rows = slots[:plain], rows[:plain]
        self._token_counts.count(slots, tokens[rows])


def _mask(logits: torch.Tensor, grammar: GrammarRows, masks: torch.Tensor) -> None:
    """Rule out what grammars do not allow. logits: [processed rows, vocab] float32, overwritten."""
    for part in _parts(len(grammar.host_rows)):
        rows = grammar.rows[part]
        logits[rows] = apply_masks(logits[rows], masks[part])


def _parts(rows: int) -> Iterator[slice]:
    """Slices of at most MAX_ROWS rows each."""
    return (slice(begin, begin + MAX_ROWS) for begin in range(0, rows, MAX_ROWS))


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, request: LogprobsRequest, masks: torch.Tensor | None
) -> RowLogprobs:
    """masks: of the rows with a grammar; None: there are none."""
    rows = logits[request.rows]
    if masks is not None and request.constrained is not None:
        constrained, own_masks = request.constrained
        rows[constrained] = apply_masks(rows[constrained], masks[own_masks])
    chosen, ranks, top, top_tokens = row_logprobs(rows, tokens[request.rows], max(request.counts))
    return RowLogprobs(request=request, chosen=chosen, ranks=ranks, top=top, top_tokens=top_tokens)
