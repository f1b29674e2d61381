"""The sampling parameters of one batch, gathered into tensors once and used until the batch's sequences change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, groupby

import numpy as np
import torch
from attrs import frozen

from engine.core.sampling.arithmetic import MAX_SELECTED_TOP_K, mix
from engine.core.sampling.token_counts import Slot
from engine.core.transfer import tensor_to_device
from engine.core.types import SamplingParams

_MAX_BIAS = 1e30
"""A greater bias would be infinite in float32, and the difference of two infinities is NaN."""


@frozen(kw_only=True)
class TokenBias:
    """logit_bias of one sequence, on the device."""

    tokens: torch.Tensor
    """[entries] int64, no token twice."""
    values: torch.Tensor
    """[entries] float32."""

    @classmethod
    def of(cls, params: SamplingParams, device: torch.device) -> TokenBias | None:
        """Read logit_bias. None: there is none. Biases of a token that is named several times add up."""
        if not params.logit_bias:
            return None
        given = np.fromiter(chain.from_iterable(params.logit_bias), np.float64).reshape(-1, 2)
        tokens, entries = np.unique(given[:, 0].astype(np.int64), return_inverse=True)
        values = np.bincount(entries, given[:, 1]).clip(-_MAX_BIAS, _MAX_BIAS).astype(np.float32)
        return cls(
            tokens=tensor_to_device(torch.from_numpy(tokens), device),
            values=tensor_to_device(torch.from_numpy(values), device),
        )


@frozen(kw_only=True)
class SequenceState:
    """The sampler's state of one sequence. Batches are put together from its tensors, which never change."""

    params: SamplingParams
    table_row: int
    """Its row in the SamplingTable."""
    bias: TokenBias | None
    banned_tokens: torch.Tensor | None
    """[tokens] int64: ruled out until the output has min_tokens tokens; None: there are none."""
    slot: Slot | None
    """Its slot in TokenCounts; None: it has no penalties."""
    min_length: int
    """Length, prompt included, from which on no token is ruled out by min_tokens."""

    @property
    def constrained(self) -> bool:
        """Whether the sequence has a grammar."""
        return self.params.grammar is not None


@frozen(kw_only=True)
class LogitBias:
    """logit_bias: one entry per (row, token), none twice."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


@frozen(kw_only=True)
class BannedTokens:
    """min_tokens: one entry per (row, token)."""

    rows: torch.Tensor
    tokens: torch.Tensor
    min_tokens: torch.Tensor
    """The token is banned until the output has this many tokens."""


@frozen(kw_only=True)
class Penalties:
    """Repetition, presence and frequency penalties: one entry per row with any, the penalties [entries, 1] float32."""

    rows: torch.Tensor
    host_rows: tuple[int, ...]
    """The rows of the batch, ascending."""
    slots: torch.Tensor
    slices: torch.Tensor
    """[entries] int64: the number of the draft slice that the row belongs to; any for rows without drafts."""
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@frozen(kw_only=True)
class GrammarRows:
    """Rows whose sequences have a grammar; those of a draft slice follow each other."""

    rows: torch.Tensor
    """[constrained rows] int64."""
    sequences: tuple[int, ...]
    host_rows: tuple[int, ...]
    """Their rows in the batch."""


@frozen(kw_only=True)
class LogitsProcessors:
    """Changes to logits before a token is chosen."""

    rows: torch.Tensor
    """[processed rows] int64, rows of the batch. `rows` of the four processors are indices into these."""
    bias: LogitBias | None
    banned: BannedTokens | None
    penalties: Penalties | None
    grammar: GrammarRows | None


@frozen(kw_only=True)
class ProcessedLogits:
    """Logits after the processors, which take the place of the model's in some rows of a batch."""

    rows: torch.Tensor
    """[processed rows] int64."""
    logits: torch.Tensor
    """[processed rows, vocab] float32."""


@frozen(kw_only=True)
class CutoffGroup:
    """Rows with top_k or top_p that one call of `arithmetic.cutoffs` serves."""

    members: torch.Tensor
    """[members] int64, indices into the rows that draw."""
    top_k: torch.Tensor
    top_p: torch.Tensor
    max_top_k: int


@frozen(kw_only=True)
class DrawParams:
    """Parameters of the rows that draw by PyTorch's operations."""

    rows: torch.Tensor
    keys: torch.Tensor
    temperature: torch.Tensor
    cutoffs: tuple[CutoffGroup, ...]
    log_min_p: torch.Tensor | None
    """[rows, 1] float32; None: no row has min_p."""
    processed: tuple[torch.Tensor, torch.Tensor] | None
    """Rows that both draw and are processed: indices into the rows that draw, and into the processed rows."""


@frozen(kw_only=True)
class LogprobsRequest:
    """Rows whose log probabilities are wanted."""

    rows: torch.Tensor
    host_rows: tuple[int, ...]
    counts: tuple[int, ...]
    """Most likely tokens to report, per row."""
    constrained: tuple[torch.Tensor, torch.Tensor] | None = None
    """Rows with a grammar: indices into `rows`, and into the constrained rows."""


@frozen(kw_only=True)
class SamplingBatch:
    """The sampling parameters of one batch, as tensors; None where no sequence uses them."""

    sequences: tuple[int, ...]
    processors: LogitsProcessors | None
    draws: bool
    """Whether any row draws."""
    draw: DrawParams | None
    """None also where a fused kernel draws, which reads the SamplingTable."""
    logprobs: LogprobsRequest | None


class SamplingBatchBuilder:
    """Builds SamplingBatches for one vocabulary on one device. fused: a kernel draws from the SamplingTable."""

    def __init__(self, vocab_size: int, device: torch.device, fused: bool) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._fused = fused

    def build(
        self, sequences: tuple[int, ...], states: Sequence[SequenceState], below_min_tokens: Collection[int]
    ) -> SamplingBatch:
        """Build the batch of these sequences, in this order.

        below_min_tokens: sequences whose output is shorter than min_tokens.
        """
        processed = [
            row
            for row, (sequence, state) in enumerate(zip(sequences, states, strict=True))
            if state.params.logit_bias or state.slot is not None or state.constrained or sequence in below_min_tokens
        ]
        below = [sequences[row] in below_min_tokens for row in processed]
        return SamplingBatch(
            sequences=sequences,
            processors=self._processors(sequences, processed, [states[row] for row in processed], below),
            draws=not all(state.params.greedy for state in states),
            draw=None if self._fused else self._draw(states, processed),
            logprobs=self._logprobs(states),
        )

    def _processors(
        self, sequences: tuple[int, ...], rows: list[int], states: Sequence[SequenceState], below: Sequence[bool]
    ) -> LogitsProcessors | None:
        if not rows:
            return None
        return LogitsProcessors(
            rows=self._ints(rows),
            bias=self._bias(states),
            banned=self._banned(states, below),
            penalties=self._penalties(sequences, rows, states),
            grammar=self._grammar(sequences, rows, states),
        )

    def _grammar(
        self, sequences: tuple[int, ...], rows: list[int], states: Sequence[SequenceState]
    ) -> GrammarRows | None:
        members = [index for index, state in enumerate(states) if state.constrained]
        if not members:
            return None
        host_rows = tuple(rows[index] for index in members)
        return GrammarRows(
            rows=self._ints(members), sequences=tuple(sequences[row] for row in host_rows), host_rows=host_rows
        )

    def _bias(self, states: Sequence[SequenceState]) -> LogitBias | None:
        members = [(row, state.bias) for row, state in enumerate(states) if state.bias is not None]
        if not members:
            return None
        tokens = [bias.tokens for _, bias in members]
        rows = self._repeated([row for row, _ in members], tokens)
        return LogitBias(rows=rows, tokens=torch.cat(tokens), values=torch.cat([bias.values for _, bias in members]))

    def _banned(self, states: Sequence[SequenceState], below: Sequence[bool]) -> BannedTokens | None:
        members = [
            (row, state.banned_tokens, state.params.min_tokens)
            for row, state in enumerate(states)
            if below[row] and state.banned_tokens is not None
        ]
        if not members:
            return None
        rows, tokens, min_tokens = zip(*members, strict=True)
        return BannedTokens(
            rows=self._repeated(rows, tokens),
            tokens=torch.cat(tokens),
            min_tokens=self._repeated(min_tokens, tokens),
        )

    def _penalties(
        self, sequences: tuple[int, ...], rows: list[int], states: Sequence[SequenceState]
    ) -> Penalties | None:
        members = [
            (index, state.slot.index, state.params) for index, state in enumerate(states) if state.slot is not None
        ]
        if not members:
            return None
        indices, slots, params = zip(*members, strict=True)
        host_rows = tuple(rows[index] for index in indices)
        slices = _slice_numbers(sequences)
        return Penalties(
            rows=self._ints(indices),
            host_rows=host_rows,
            slots=self._ints(slots),
            slices=self._ints([slices[row] for row in host_rows]),
            repetition=self._floats([each.repetition_penalty for each in params])[:, None],
            presence=self._floats([each.presence_penalty for each in params])[:, None],
            frequency=self._floats([each.frequency_penalty for each in params])[:, None],
        )

    def _draw(self, states: Sequence[SequenceState], processed: list[int]) -> DrawParams | None:
        rows = [row for row, state in enumerate(states) if not state.params.greedy]
        if not rows:
            return None
        params = [states[row].params for row in rows]
        limit = min(MAX_SELECTED_TOP_K, self._vocab_size)
        selected = [index for index, each in enumerate(params) if 0 < each.top_k <= limit]
        among_selected = set(selected)
        ordered = [
            index
            for index, each in enumerate(params)
            if index not in among_selected and (each.top_p < 1 or 0 < each.top_k < self._vocab_size)
        ]
        log_min_p = self._floats([each.min_p for each in params]).log()[:, None]
        index_of = {row: index for index, row in enumerate(rows)}
        both = [(index_of[row], index) for index, row in enumerate(processed) if row in index_of]
        return DrawParams(
            rows=self._ints(rows),
            keys=mix(self._ints([each.seed or 0 for each in params])),
            temperature=self._floats([each.temperature for each in params])[:, None],
            cutoffs=tuple(self._cutoff_group(params, members) for members in (selected, ordered) if members),
            log_min_p=log_min_p if any(each.min_p > 0 for each in params) else None,
            processed=(self._ints([a for a, _ in both]), self._ints([b for _, b in both])) if both else None,
        )

    def _cutoff_group(self, params: list[SamplingParams], members: list[int]) -> CutoffGroup:
        top_k = [min(params[index].top_k or self._vocab_size, self._vocab_size) for index in members]
        # The sum of all probabilities may round to 1 before the last token: without top_p, no sum may reach the bound.
        top_p = [params[index].top_p if params[index].top_p < 1 else 2.0 for index in members]
        return CutoffGroup(
            members=self._ints(members),
            top_k=self._ints(top_k)[:, None],
            top_p=self._floats(top_p)[:, None],
            max_top_k=max(top_k),
        )

    def _logprobs(self, states: Sequence[SequenceState]) -> LogprobsRequest | None:
        members = [
            (row, state.params.logprobs) for row, state in enumerate(states) if state.params.logprobs is not None
        ]
        if not members:
            return None
        rows, counts = zip(*members, strict=True)
        constrained = [row for row, state in enumerate(states) if state.constrained]
        index_of = {row: index for index, row in enumerate(constrained)}
        both = [(index, index_of[row]) for index, row in enumerate(rows) if row in index_of]
        return LogprobsRequest(
            rows=self._ints(rows),
            host_rows=rows,
            counts=counts,
            constrained=(self._ints([a for a, _ in both]), self._ints([b for _, b in both])) if both else None,
        )

    def _repeated(self, values: Sequence[int], tokens: Sequence[torch.Tensor]) -> torch.Tensor:
        """Each value repeated for each token of its tensor in `tokens`: [all tokens] int64."""
        counts = [len(each) for each in tokens]
        return self._ints(values).repeat_interleave(self._ints(counts), output_size=sum(counts))

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return tensor_to_device(torch.tensor(values, dtype=torch.int64), self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return tensor_to_device(torch.tensor(values, dtype=torch.float32), self._device)


def _slice_numbers(sequences: Sequence[int]) -> list[int]:
    """The number of the draft slice that each row belongs to: a sequence with several rows has drafts. 0 also for the
    rows before all slices."""
    numbers: list[int] = []
    slices = 0
    for _, rows in groupby(sequences):
        count = sum(1 for _ in rows)
        numbers += [slices] * count
        slices += count > 1
    return numbers
