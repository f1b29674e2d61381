"""The sampler: from logits to the next token of each sequence of a batch.

The order of operations, for each row:

1. logit_bias is added; tokens that would end the request are banned until min_tokens tokens were sampled.
2. repetition_penalty (prompt and output), then frequency_penalty and presence_penalty (output only).
3. Greedy rows take the most likely token: the first of the largest logits, as the model returns them in its dtype.
   A row is greedy with temperature 0 (or under 1e-5, where float32 leaves no choice) or with top_k 1.
   A row of a sequence with a grammar allows only the tokens that may come next (`grammar_masks.py`), as the last edit
   before this step.
4. The other rows: divide by temperature; top_k; top_p of what top_k left; min_p; draw.

From the penalties on this is the order of transformers' `generate`; vLLM applies min_p before top_k. Tokens that tie
with the last one kept by top_k or top_p are kept too. Log probabilities are the model's own, of the unprocessed logits;
with a grammar, of the logits of the tokens that the grammar allows.

A batch takes the cheapest path that serves all of its sequences: greedy (step 3 alone), draw (steps 3 and 4) or full
(all steps, and log probabilities). What steps 3 and 4 need lies in the SamplingTable on the device, so that the greedy
and the draw path can be captured in a CUDA graph, and steps with and without graphs can alternate.

A sequence with drafts has a row for each of its positions, which samples by the random number of the position. Drafts
are accepted up to the first that differs from the token sampled in its place: the tokens are those of sampling one by
one. Steps 1 and 2 count the drafts before a row as outputs, and a grammar follows them.

Sampling does not wait for the device, and does no host work per row while the batch's sequences stay the same. Rows
that are not finite (NaN, +inf, or -inf everywhere, before or after step 2) are therefore found in
`SampledTokens.to_host`, which waits anyway: the max logits travel with the tokens. The host then sees NO_TOKEN, and the
scheduler ends the request; until it does, the device goes on with any token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.layers.lm_head import Argmax, plain_argmax
from engine.core.sampling.base import SamplingPath
from engine.core.sampling.draft_rows import DraftRows, VerifiedDrafts
from engine.core.sampling.draw import DrawPath, DrawRows
from engine.core.sampling.full import FullPath
from engine.core.sampling.grammar_masks import GrammarMasks
from engine.core.sampling.greedy import GreedyPath
from engine.core.sampling.prompt_logprobs import PromptLogprobs, StepPromptLogprobs
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.sampling.sampling_batch import SamplingBatch, SamplingBatchBuilder, SequenceState, TokenBias
from engine.core.sampling.sampling_table import SamplingTable
from engine.core.sampling.token_counts import TokenCounts
from engine.core.sampling.verify import accept_matching
from engine.core.transfer import HostCopy, tensor_to_device, to_device
from engine.core.types import NewSequence, SamplingParams, Step

if TYPE_CHECKING:
    from engine.core.grammars.compiler import Grammars
    from engine.core.models.base import Model


class Sampler:
    """Samples for the running sequences; keeps all that sampling needs of a sequence from `add` to `remove`."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        eos_tokens: frozenset[int],
        *,
        max_running: int,
        fused: bool,
        same_on_all_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda tokens: tokens,
        grammars: Grammars | None = None,
        draft_rows: int = 0,
    ) -> None:
        """max_running: rows of the SamplingTable that sequences can have. fused: sample by Triton kernels instead of
        PyTorch's operations. same_on_all_ranks: replaces drawn tokens by those of rank 0; greedy tokens are the same
        on all ranks, since the logits are. grammars: compiles those of sequences; None: no sequence has one.
        draft_rows: further rows of the SamplingTable, for the tokens of draft slices."""
        self._device = device = torch.device(device)
        self._vocab_size = vocab_size
        self._eos_tokens = eos_tokens
        self._sequences: dict[int, SequenceState] = {}
        self._unwritten: list[tuple[SequenceState, int]] = []
        """Sequences, with their numbers of outputs, that the table does not have yet."""
        self._until_min_tokens: dict[int, int] = {}
        """For each sequence below min_tokens: output tokens still needed to reach min_tokens."""
        self._builder = SamplingBatchBuilder(vocab_size, device, fused)
        self._batch: SamplingBatch | None = None
        self._prompt_logprobs = PromptLogprobs()
        self.table = SamplingTable(max_running, device, draft_rows)
        self._token_counts = TokenCounts(vocab_size, max_running, device)
        self._grammar_masks = GrammarMasks(grammars, vocab_size, device)
        max_and_index: Argmax = plain_argmax
        draw_kernel: DrawRows | None = None
        self._match_rows: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        if fused:
            from engine.ops.sampling.argmax import argmax_rows
            from engine.ops.sampling.sample import draw_rows
            from engine.ops.sampling.verify import match_rows

            max_and_index, self._match_rows, columns = argmax_rows, match_rows, self.table.columns
            draw_kernel = lambda logits, rows, offsets: draw_rows(logits, rows, offsets=offsets, **columns)  # noqa: E731
        self.greedy_path = GreedyPath(self.table, max_and_index)
        self.draw_path = DrawPath(self.table, self.greedy_path, draw_kernel, same_on_all_ranks)
        self.full_path = FullPath(self.table, self._token_counts, self._grammar_masks, self.greedy_path, self.draw_path)

    def update(self, step: Step, row_of: Callable[[int], int]) -> None:
        """Remove finished sequences and add new ones. row_of: returns a sequence's row in the SamplingTable."""
        for sequence in step.finished:
            self.remove(sequence)
        for new in step.new:
            self.add(new, row_of(new.sequence))
        if self._until_min_tokens and (step.drafts or step.positions):
            self._correct_min_tokens(step)

    def add(self, new: NewSequence, table_row: int) -> None:
        """Add a sequence; its tokens beyond the prompt count as its output.

        Raises InvalidRequestError for a logit_bias outside the vocabulary, ExecutorError for a sequence without seed.
        """
        params = new.params
        for token, _ in params.logit_bias:
            if token >= self._vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}; the vocabulary ends at {self._vocab_size - 1}", "logit_bias"
                )
        if params.seed is None and not params.greedy:
            raise ExecutorError(f"sequence {new.sequence} draws its tokens but has no seed; the engine sets one")
        ending = self._ending_tokens(params)
        if params.grammar is not None:
            self._grammar_masks.add(new, ending)  # which also bans the ending tokens, where others may come
            ending = []
        banned = tensor_to_device(torch.tensor(ending, dtype=torch.int64), self._device) if ending else None
        state = SequenceState(
            params=params,
            table_row=table_row,
            bias=TokenBias.of(params, self._device),
            banned_tokens=banned,
            slot=self._token_counts.add(new) if params.has_penalties else None,
            min_length=new.prompt_len + params.min_tokens,
        )
        num_outputs = len(new.tokens) - new.prompt_len
        self._sequences[new.sequence] = state
        self._unwritten.append((state, num_outputs))
        self._prompt_logprobs.add(new)
        if not params.greedy:
            self.draw_path.needed_by.add(new.sequence)
        if state.banned_tokens is not None and num_outputs < params.min_tokens:
            self._until_min_tokens[new.sequence] = params.min_tokens - num_outputs
        if _always_needs_full(state) or new.sequence in self._until_min_tokens:
            self.full_path.needed_by.add(new.sequence)

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        self._batch = None
        removed = self._sequences.pop(sequence)
        self._unwritten = [(state, outputs) for state, outputs in self._unwritten if state is not removed]
        self._until_min_tokens.pop(sequence, None)
        self._prompt_logprobs.remove(sequence)
        self._grammar_masks.remove(sequence)
        self.full_path.needed_by.discard(sequence)
        self.draw_path.needed_by.discard(sequence)
        if removed.slot is not None:
            self._token_counts.free(removed.slot)

    def sampling_path(self, sequences: Sequence[int]) -> SamplingPath:
        """The cheapest path that serves a batch of these sequences."""
        if self.full_path.is_needed(sequences):
            return self.full_path
        if self.draw_path.is_needed(sequences):
            return self.draw_path
        return self.greedy_path

    def graph_path(self, sequences: Sequence[int]) -> SamplingPath:
        """The path of the CUDA graph to replay for a batch of these sequences.

        Writes to the SamplingTable, which the graph reads, the sequences added since the last call.
        """
        path = self.sampling_path(sequences)
        self.flush()
        return path if path.capturable else self.full_path

    @property
    def graph_paths(self) -> list[SamplingPath]:
        """The paths that `graph_path` can return."""
        return [path for path in (self.greedy_path, self.draw_path, self.full_path) if path.capturable]

    def flush(self) -> None:
        """Write the sequences added since the last call to the SamplingTable, in one copy."""
        if self._unwritten:
            states, num_outputs = zip(*self._unwritten, strict=True)
            self.table.write([each.table_row for each in states], [each.params for each in states], num_outputs)
            self._unwritten.clear()

    def sample(
        self,
        logits: torch.Tensor,
        sequences: Sequence[int],
        table_rows: torch.Tensor,
        drafts: DraftRows | None = None,
    ) -> SampledTokens:
        """Sample the next token of each of these sequences, and advance the SamplingTable.

        logits: [n, vocab], left unchanged; sequences: [n], a sequence several times only in rows of drafts; table_rows:
        [n] int64 on the device, the rows that the sequences were added with. drafts: the last rows, whose sequences
        `verify` advances; None: no row verifies drafts.
        """
        self.flush()
        batch = self._batch_of(tuple(sequences))
        sampled = self.sampling_path(batch.sequences).sample(logits, batch, table_rows, drafts)
        self._count_down_min_tokens(batch.sequences)
        return sampled

    def verify(self, drafts: DraftRows, sampled: torch.Tensor, last_tokens: torch.Tensor) -> VerifiedDrafts:
        """Accept the drafts that were sampled in their places, and advance their sequences.

        sampled: [rows] int64, tokens of `sample`; last_tokens: [table rows] int64, where the token after the accepted
        drafts is stored. Does not wait for the device.
        """
        rows = drafts.table_rows
        if self._match_rows is not None:
            accepted, _ = self._match_rows(
                drafts.drafts, sampled, drafts.first, rows, last_tokens=last_tokens, num_outputs=self.table.num_outputs
            )
        else:
            places = drafts.first[:, None] + torch.arange(drafts.drafts.shape[1], device=sampled.device)
            accepted = accept_matching(drafts.drafts, sampled[places.clamp(max=len(sampled) - 1)])
            last_tokens.index_copy_(0, rows, sampled[drafts.first + accepted])
            self.table.num_outputs.index_add_(0, rows, accepted + 1)
        if self._token_counts.used:
            self._count_verified(drafts, sampled, accepted)
        copy = HostCopy.begin(accepted)
        return VerifiedDrafts(rows=drafts, sampled=sampled, num_accepted=accepted, accepted=copy)

    def prompt_logprobs(self, step: Step, hidden: torch.Tensor, model: Model) -> StepPromptLogprobs:
        """Log probabilities of prompt tokens, where asked for; see `PromptLogprobs.compute`."""
        return self._prompt_logprobs.compute(step, hidden, model) if self._prompt_logprobs else ()

    def _ending_tokens(self, params: SamplingParams) -> list[int]:
        """The tokens that would end a request before its min_tokens."""
        if params.min_tokens == 0:
            return []
        ends = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_tokens)
        return sorted(token for token in ends if token < self._vocab_size)

    def _count_down_min_tokens(self, sequences: tuple[int, ...]) -> None:
        """Count one more token of each sequence, also where drafts may add more (`_correct_min_tokens`). Replays of the
        greedy and draw paths need no count: no sequence below min_tokens is in such a batch."""
        for number in self._until_min_tokens.keys() & set(sequences) if self._until_min_tokens else ():
            self._set_missing(number, self._until_min_tokens[number] - 1)

    def _correct_min_tokens(self, step: Step) -> None:
        """Count the drafts that were accepted in earlier steps. Until then the full path serves their sequences; it
        bans no token for too long, since it counts the outputs on the device."""
        last_tokens = (*step.positions, *((part.sequence, part.start) for part in step.drafts))
        for number, position in last_tokens:
            if number in self._until_min_tokens:
                self._set_missing(number, self._sequences[number].min_length - position - 1)

    def _set_missing(self, number: int, missing: int) -> None:
        """Set how many output tokens a sequence still needs to reach its min_tokens."""
        self._until_min_tokens[number] = missing
        if missing <= 0:
            del self._until_min_tokens[number]
            self._batch = None
            if not _always_needs_full(self._sequences[number]):
                self.full_path.needed_by.discard(number)

    def _count_verified(self, drafts: DraftRows, sampled: torch.Tensor, accepted: torch.Tensor) -> None:
        """Count the tokens that draft slices yielded, for the penalties. accepted: [slices] int64."""
        slots = [
            (number, state.slot.index)
            for number, part in enumerate(drafts.slices)
            if (state := self._sequences.get(part.sequence)) is not None and state.slot is not None
        ]
        if not slots:
            return
        [on_device] = to_device([np.array(slots, np.int64)], self._device)
        chosen, slot_numbers = on_device.unbind(1)
        num_tokens = accepted[chosen] + 1
        places = torch.arange(drafts.drafts.shape[1] + 1, device=self._device)
        rows = (drafts.first[chosen][:, None] + places).clamp(max=len(sampled) - 1)
        self._token_counts.count_first(slot_numbers, sampled[rows], num_tokens)

    def _batch_of(self, sequences: tuple[int, ...]) -> SamplingBatch:
        if self._batch is None or self._batch.sequences != sequences:
            unknown = [str(sequence) for sequence in sequences if sequence not in self._sequences]
            if unknown:
                raise ExecutorError(f"the sampler has no sequence {', '.join(unknown)}: not added, or removed")
            states = [self._sequences[sequence] for sequence in sequences]
            self._batch = self._builder.build(sequences, states, self._until_min_tokens)
        return self._batch


def _always_needs_full(state: SequenceState) -> bool:
    """Whether a sequence needs the full path for all of its tokens, not only until min_tokens."""
    params = state.params
    return bool(params.logit_bias) or state.slot is not None or params.logprobs is not None or state.constrained
