"""From logits to tokens: what each request asks of its next token, for the whole batch at once.

The order, for each row:

1. logit_bias is added; until min_tokens tokens were sampled, the tokens that would end the request are ruled out.
2. repetition_penalty (prompt and output), then frequency_penalty and presence_penalty (output only).
3. Greedy rows take the likeliest token, the first of equals. Greedy is: temperature 0 (or under 1e-5, where float32
   leaves nothing to choose), and top_k 1.
4. The others: divide by temperature; top_k; top_p of what that left; min_p; draw.

That is the order of transformers' `generate` from the penalties on; vLLM puts min_p before top_k. Tokens that tie with
the last one kept by top_k or top_p are kept too. Log probabilities are the model's own, of the logits as they came.

A draw inverts the cumulative distribution, in order of token number, at a uniform number that is a hash of the seed and
of how many tokens the sequence has put out, so that it depends neither on the batch nor on preemption.

Nothing in `sample` waits for the device, and while the same sequences follow each other it does no work per row on the
host. Logits that are not finite (NaN, +inf, or -inf everywhere) are therefore noticed in `Sampled.to_host`, which waits
anyway: the mark travels with the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.sampling_ops import cutoffs, draw, penalize, rank_tokens, uniforms
from engine.core.sampling_plan import Draw, Plan, Planner, Report, SequenceState
from engine.core.types import NewSequence, SamplingParams, TokenLogprobs

_ROWS_AT_ONCE = 256


class _Occurrences:
    """Which tokens occurred how often, one row of the vocabulary for each sequence that has penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """[slots, vocab]: times in the output."""
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        """[slots, vocab]: in the prompt or the output."""
        self._free: list[int] = []

    def add(self, new: NewSequence) -> int:
        """Count a sequence's tokens into a free slot."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        vocab_size = self.counts.shape[1]
        tokens = torch.tensor(new.tokens, dtype=torch.int64)
        self.counts[slot] = torch.bincount(tokens[new.prompt_len :], minlength=vocab_size).to(self.counts)
        self.seen[slot] = (torch.bincount(tokens, minlength=vocab_size) > 0).to(self.seen)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self._free.append(slot)

    def _grow(self) -> None:
        old = self.counts.shape[0]
        more = max(4, old)
        self.counts = torch.cat([self.counts, self.counts.new_zeros(more, self.counts.shape[1])])
        self.seen = torch.cat([self.seen, self.seen.new_zeros(more, self.seen.shape[1])])
        self._free.extend(reversed(range(old, old + more)))


@frozen(kw_only=True)
class _Logprobs:
    """The results for the rows of a report."""

    report: Report
    chosen: torch.Tensor
    ranks: torch.Tensor
    best: torch.Tensor
    best_tokens: torch.Tensor


@frozen(kw_only=True)
class Sampled:
    """One token a row, on the device."""

    tokens: torch.Tensor
    """[rows] int64, all within the vocabulary, whatever the logits."""
    _checked: torch.Tensor = field(alias="checked")
    """[rows] int64: the same, -1 where the logits were not finite."""
    _sequences: tuple[int, ...] = field(alias="sequences")
    _logprobs: _Logprobs | None = field(alias="logprobs")

    def to_host(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Wait for the tokens, and for the log probabilities of the rows that asked (None for the others).

        Raises ExecutorError naming the sequences whose logits were not finite.
        """
        tokens: list[int] = self._checked.tolist()
        if min(tokens, default=0) < 0:
            bad = [str(number) for number, token in zip(self._sequences, tokens, strict=True) if token < 0]
            raise ExecutorError(
                f"the logits of sequence {', '.join(bad)} are not finite (NaN or infinite), so no token can be "
                "sampled; the weights may be damaged, or the numbers outgrow this dtype: try bfloat16 or float32"
            )
        entries: list[TokenLogprobs | None] = [None] * len(tokens)
        if self._logprobs is not None:
            found, report = self._logprobs, self._logprobs.report
            chosen = [tokens[row] for row in report.host_rows]
            lines = _to_entries(chosen, report.counts, found.chosen, found.ranks, found.best, found.best_tokens)
            for row, entry in zip(report.host_rows, lines, strict=True):
                entries[row] = entry
        return tokens, entries


class Sampler:
    """Samples for the sequences it was told of; everything a sequence needs is kept here until it is removed."""

    def __init__(self, vocab_size: int, device: torch.device | str, eos_tokens: frozenset[int]) -> None:
        self._vocab_size = vocab_size
        device = torch.device(device)
        self._eos_tokens = eos_tokens
        self._sequences: dict[int, SequenceState] = {}
        self._occurrences = _Occurrences(vocab_size, device)
        self._planner = Planner(vocab_size, device)
        self._plan: Plan | None = None

    def add(self, new: NewSequence) -> None:
        """Learn of a sequence; what its tokens hold beyond the prompt counts as its output.

        Raises InvalidRequestError for a logit_bias outside the vocabulary, ExecutorError for a sequence without seed.
        """
        params = new.params
        for token, _ in params.logit_bias:
            if token >= self._vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}; the vocabulary ends at {self._vocab_size - 1}", "logit_bias"
                )
        sequence = SequenceState(
            params=params, outputs=len(new.tokens) - new.prompt_len, forbidden=self._forbidden(params), slot=None
        )
        if params.seed is None and not sequence.greedy:
            raise ExecutorError(f"sequence {new.sequence} is to be sampled but has no seed; the engine sets one")
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            sequence.slot = self._occurrences.add(new)
        self._sequences[new.sequence] = sequence

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        self._leave_plan()
        gone = self._sequences.pop(sequence)
        if gone.slot is not None:
            self._occurrences.free(gone.slot)

    def sample(self, logits: torch.Tensor, sequences: Sequence[int]) -> Sampled:
        """Sample the next token of each of these sequences, which then counts as put out.

        logits: [rows, vocab], left as they are; sequences: [rows], no number twice.
        """
        key = tuple(sequences)
        plan = self._plan
        if plan is None or plan.sequences != key:
            self._leave_plan()
            plan = self._plan = self._make_plan(key)
        plan.used += 1

        peaks, tokens = logits.max(dim=-1)
        scores = logits
        if plan.bias is not None or plan.forbidden is not None or plan.penalties is not None:
            scores = self._edit(logits.to(torch.float32, copy=True), plan)
            tokens = scores.argmax(dim=-1)
        if plan.draw is not None:
            assert plan.positions is not None
            tokens[plan.draw.rows] = _draw_rows(scores, plan.draw, plan.positions)
        if plan.penalties is not None:
            slots, taken = plan.penalties.slots, tokens[plan.penalties.rows]
            self._occurrences.counts[slots, taken] += 1
            self._occurrences.seen[slots, taken] = True
        if plan.positions is not None:
            plan.positions += 1
        return Sampled(
            tokens=tokens,
            checked=torch.where(peaks.isfinite(), tokens, -1),
            sequences=key,
            logprobs=None if plan.report is None else _report(logits, tokens, plan.report),
        )

    def _edit(self, scores: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Bias, min_tokens and penalties; scores: [rows, vocab] float32, overwritten."""
        if (bias := plan.bias) is not None:
            scores.index_put_((bias.rows, bias.tokens), bias.values, accumulate=True)
        if (forbidden := plan.forbidden) is not None:
            assert plan.positions is not None
            place = (forbidden.rows, forbidden.tokens)
            early = plan.positions[forbidden.rows] < forbidden.until
            scores.index_put_(place, scores[place].masked_fill(early, -float("inf")))
        if (penalties := plan.penalties) is not None:
            seen, counts = self._occurrences.seen[penalties.slots], self._occurrences.counts[penalties.slots]
            strengths = penalties.repetition, penalties.presence, penalties.frequency
            scores[penalties.rows] = penalize(scores[penalties.rows], seen, counts, *strengths)
        return scores

    def _forbidden(self, params: SamplingParams) -> tuple[int, ...]:
        """The tokens that would end a request too early."""
        if params.min_tokens == 0:
            return ()
        ends = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_tokens)
        return tuple(sorted(token for token in ends if token < self._vocab_size))

    def _leave_plan(self) -> None:
        """Carry what the present plan sampled over to its sequences."""
        if self._plan is not None:
            for number in self._plan.sequences:
                self._sequences[number].outputs += self._plan.used
            self._plan = None

    def _make_plan(self, numbers: tuple[int, ...]) -> Plan:
        unknown = [str(number) for number in numbers if number not in self._sequences]
        if unknown:
            raise ExecutorError(f"the sampler was not told of sequence {', '.join(unknown)}, or was told to forget it")
        return self._planner.plan(numbers, [self._sequences[number] for number in numbers])


def prompt_logprobs(logits: torch.Tensor, next_tokens: torch.Tensor, count: int) -> tuple[TokenLogprobs, ...]:
    """Log probability of the token that followed each position, and of the `count` likeliest ones; waits.

    logits: [rows, vocab]; next_tokens: [rows] int64.
    """
    entries: list[TokenLogprobs] = []
    for some, tokens in zip(torch.split(logits, _ROWS_AT_ONCE), torch.split(next_tokens, _ROWS_AT_ONCE), strict=True):
        chosen: list[int] = tokens.tolist()
        entries += _to_entries(chosen, [count] * len(chosen), *rank_tokens(some, tokens, count))
    return tuple(entries)


def _draw_rows(scores: torch.Tensor, plan: Draw, positions: torch.Tensor) -> torch.Tensor:
    """Temperature, top_k, top_p, min_p and the draw, for the rows that draw: [rows that draw] int64."""
    scores = scores[plan.rows].float()
    # The likeliest token stands at 0: no temperature can make it overflow, and min_p is a plain bound.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / plan.temperature
    least = torch.full_like(plan.temperature, -float("inf")) if plan.min_p is None else plan.min_p
    for cutoff in plan.cutoffs:
        found = cutoffs(scores[cutoff.members], cutoff.top_k, cutoff.top_p, cutoff.widest)
        least = least.index_copy(0, cutoff.members, torch.maximum(least[cutoff.members], found))
    if plan.cutoffs or plan.min_p is not None:
        scores = scores.masked_fill(scores < least, -float("inf"))
    return draw(scores, uniforms(plan.keys, positions[plan.rows]))


def _report(logits: torch.Tensor, tokens: torch.Tensor, report: Report) -> _Logprobs:
    chosen, ranks, best, best_tokens = rank_tokens(logits[report.rows], tokens[report.rows], max(report.counts))
    return _Logprobs(report=report, chosen=chosen, ranks=ranks, best=best, best_tokens=best_tokens)


def _to_entries(
    tokens: Sequence[int],
    counts: Sequence[int],
    chosen: torch.Tensor,
    ranks: torch.Tensor,
    best: torch.Tensor,
    best_tokens: torch.Tensor,
) -> list[TokenLogprobs]:
    """Results of `rank_tokens` as plain data, row for row with as many of the likeliest as `counts` says."""
    columns = zip(tokens, counts, chosen.tolist(), ranks.tolist(), best.tolist(), best_tokens.tolist(), strict=True)
    return [
        TokenLogprobs(
            token=token,
            logprob=logprob,
            rank=rank,
            top=tuple(zip(top_tokens[:count], top[:count], strict=True)),
        )
        for token, count, logprob, rank, top, top_tokens in columns
    ]
