"""The full path: logits processors before a token is chosen, and log probabilities of the tokens chosen.

The mask of a grammar comes last, so that no bias lets a token through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.core.sampling.arithmetic import apply_masks, penalize, row_logprobs
from engine.core.sampling.base import SamplingPath
from engine.core.sampling.sampled_tokens import RowLogprobs, SampledTokens
from engine.core.sampling.sampling_batch import LogitsProcessors, LogprobsRequest, ProcessedLogits, SamplingBatch

if TYPE_CHECKING:
    from engine.core.models.base import Model
    from engine.core.sampling.draft_rows import DraftRows
    from engine.core.sampling.draw import DrawPath
    from engine.core.sampling.grammar_masks import GrammarMasks
    from engine.core.sampling.greedy import GreedyPath
    from engine.core.sampling.sampling_table import SamplingTable
    from engine.core.sampling.token_counts import TokenCounts


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
            chosen = self._process(logits[processors.rows].float(), processors, table_rows[processors.rows])
            if (grammar := processors.grammar) is not None:
                masks = self._grammar_masks.fill(grammar.sequences)
                chosen[grammar.rows] = apply_masks(chosen[grammar.rows], masks)
            processed = ProcessedLogits(rows=processors.rows, logits=chosen)
        if batch.draws:
            tokens, max_logits = self._draw.choose(logits, batch, table_rows, processed, drafts)
        else:
            tokens, max_logits = self._greedy.choose(logits, processed)
        if processors is not None and processors.penalties is not None:
            penalties = processors.penalties
            self._token_counts.count(penalties.slots, tokens[processors.rows][penalties.rows])
        self._table.advance(table_rows if drafts is None else table_rows[: drafts.num_before])
        logprobs = None if batch.logprobs is None else _logprobs(logits, tokens, batch.logprobs, masks)
        sampled = SampledTokens.from_tokens(tokens, max_logits, logprobs)
        if grammar is not None:
            self._grammar_masks.note(grammar, sampled)
        return sampled

    def _process(self, logits: torch.Tensor, processors: LogitsProcessors, table_rows: torch.Tensor) -> torch.Tensor:
        """Apply bias, min_tokens and penalties; logits: [processed rows, vocab] float32, overwritten; table_rows:
        [processed rows]."""
        if (bias := processors.bias) is not None:
            place = (bias.rows, bias.tokens)
            logits.index_put_(place, logits[place] + bias.values)
        if (banned := processors.banned) is not None:
            place = (banned.rows, banned.tokens)
            early = self._table.num_outputs[table_rows[banned.rows]] < banned.min_tokens
            logits.index_put_(place, logits[place].masked_fill(early, -float("inf")))
        if (penalties := processors.penalties) is not None:
            seen, counts = self._token_counts.seen[penalties.slots], self._token_counts.counts[penalties.slots]
            strengths = penalties.repetition, penalties.presence, penalties.frequency
            logits[penalties.rows] = penalize(logits[penalties.rows], seen, counts, *strengths)
        return logits


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
