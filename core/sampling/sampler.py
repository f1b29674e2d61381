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

What steps 3 and 4 need lies in the SamplingTable on the device. A batch whose sequences need nothing else (`kind` says
so) can therefore be sampled by the model's own argmax or by `draw` inside a CUDA graph, and by `sample` in any step
between.

Nothing here waits for the device, and while the same sequences follow each other `sample` does no work per row on the
host. Logits that are not finite (NaN, +inf, or -inf everywhere) are therefore noticed in `SampledTokens.to_host`, which
waits anyway: the peaks travel with the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.core.errors import ExecutorError, InvalidRequestError
from engine.core.runner.transfer import send
from engine.core.sampling.batch_params import Draw, Edit, Plan, Planner, Report, SequenceState
from engine.core.sampling.ops import cutoffs, draw, penalize, rank_tokens, uniforms
from engine.core.sampling.result import Ranks, SampledTokens, to_entries
from engine.core.sampling.table import SamplingTable
from engine.core.types import NewSequence, SamplingParams, TokenLogprobs

GREEDY = "greedy"
DRAW = "draw"
FULL = "full"
_ROWS_AT_ONCE = 256

DrawRows = Callable[[torch.Tensor, torch.Tensor, SamplingTable], tuple[torch.Tensor, torch.Tensor]]
"""(logits, rows, table) to (tokens, peaks); see `ops/sampling.py`."""

Argmax = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""See `_argmax`."""


class _Occurrences:
    """Which tokens occurred how often, one row of the vocabulary for each sequence that has penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
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
        tokens = send(torch.tensor(new.tokens, dtype=torch.int64), self._device)
        output = tokens[new.prompt_len :]
        self.counts[slot].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        self.seen[slot].zero_().index_fill_(0, tokens, True)
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


class Sampler:
    """Samples for the sequences it was told of; everything a sequence needs is kept here until it is removed.

    max_running: as many rows, numbered from 0, sequences can be given. fused: draw by a Triton kernel, not by PyTorch.
    agree: given drawn tokens, returns those that all ranks of a model go on with; what is merely the likeliest is the
    same on all ranks, since they have the same logits.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        eos_tokens: frozenset[int],
        *,
        max_running: int,
        fused: bool,
        agree: Callable[[torch.Tensor], torch.Tensor] = lambda tokens: tokens,
    ) -> None:
        self._vocab_size = vocab_size
        self._agree = agree
        device = torch.device(device)
        self._eos_tokens = eos_tokens
        self.table = SamplingTable(max_running, device)
        self._sequences: dict[int, SequenceState] = {}
        self._unwritten: list[tuple[SequenceState, int]] = []
        """New sequences, with their outputs, that the table does not hold yet."""
        self._held: dict[int, int] = {}
        """Sequence -> how many tokens it still has to put out before a stop token may come."""
        self._full: set[int] = set()
        """Sequences that only `sample` can serve."""
        self._drawing: set[int] = set()
        self._occurrences = _Occurrences(vocab_size, device)
        self._planner = Planner(vocab_size, device, fused)
        self._plan: Plan | None = None
        self._draw_rows: DrawRows | None = None
        self._argmax: Argmax = _argmax
        if fused:
            from engine.ops.sampling.argmax import argmax_rows
            from engine.ops.sampling.sample import draw_rows

            self._argmax, self._draw_rows = argmax_rows, draw_rows

    def add(self, new: NewSequence, row: int) -> None:
        """Learn of a sequence, whose row in the tables of the running is given; what its tokens hold beyond the prompt
        counts as its output. The table learns of it in `flush`.

        Raises InvalidRequestError for a logit_bias outside the vocabulary, ExecutorError for a sequence without seed.
        """
        params = new.params
        for token, _ in params.logit_bias:
            if token >= self._vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}; the vocabulary ends at {self._vocab_size - 1}", "logit_bias"
                )
        if params.seed is None and not params.greedy:
            raise ExecutorError(f"sequence {new.sequence} is to be sampled but has no seed; the engine sets one")
        penalized = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        sequence = SequenceState(
            params=params,
            row=row,
            forbidden=self._forbidden(params),
            slot=self._occurrences.add(new) if penalized else None,
        )
        outputs = len(new.tokens) - new.prompt_len
        self._sequences[new.sequence] = sequence
        self._unwritten.append((sequence, outputs))
        if not sequence.greedy:
            self._drawing.add(new.sequence)
        if sequence.forbidden and outputs < params.min_tokens:
            self._held[new.sequence] = params.min_tokens - outputs
        if _always_full(sequence) or new.sequence in self._held:
            self._full.add(new.sequence)

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        self._plan = None
        gone = self._sequences.pop(sequence)
        self._unwritten = [(each, outputs) for each, outputs in self._unwritten if each is not gone]
        self._held.pop(sequence, None)
        self._full.discard(sequence)
        self._drawing.discard(sequence)
        if gone.slot is not None:
            self._occurrences.free(gone.slot)

    def flush(self) -> None:
        """Write the sequences added last into the table, all in one copy. `sample` does so by itself; before a CUDA
        graph that samples is replayed, it must be called."""
        if self._unwritten:
            sequences, outputs = zip(*self._unwritten, strict=True)
            self.table.write([each.row for each in sequences], [each.params for each in sequences], outputs)
            self._unwritten.clear()

    def kind(self, sequences: Sequence[int]) -> str:
        """What these sequences' next tokens take: "greedy", the likeliest and no more (who takes it elsewhere counts it
        by `table.advance`), "draw", for which the method of that name will do, or "full" (a bias, penalties, min_tokens
        not yet reached, log probabilities), which is for `sample` alone."""
        if self._full and not self._full.isdisjoint(sequences):
            return FULL
        if self._drawing and not self._drawing.isdisjoint(sequences):
            return DRAW
        return GREEDY

    def draw(self, logits: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of rows of which any may draw, which then counts as put out; may be captured in a CUDA graph.

        For a fused sampler. logits: [n, vocab]; rows: [n] int64, places in the table, the padding row as often as need
        be. Returns (tokens [n] int64, peaks [n] float32), as `SampledTokens.from_tokens` takes them.
        """
        assert self._draw_rows is not None
        tokens, peaks = self._draw_rows(logits, rows, self.table)
        self.table.advance(rows)
        return self._agree(tokens), peaks

    def sample(self, logits: torch.Tensor, sequences: Sequence[int], rows: torch.Tensor) -> SampledTokens:
        """Sample the next token of each of these sequences, which then counts as put out.

        logits: [n, vocab], left as they are; sequences: [n], no number twice; rows: [n] int64 on the device, the row
        that each was added with.
        """
        self.flush()
        plan = self._find_plan(tuple(sequences))
        edit = plan.edit
        scores = None if edit is None else self._edit(logits[edit.places].float(), edit, rows[edit.places])
        tokens, peaks = self._choose(logits, scores, plan, rows)
        if plan.drawn:
            tokens = self._agree(tokens)
        if edit is not None and edit.penalties is not None:
            slots, taken = edit.penalties.slots, tokens[edit.places][edit.penalties.rows]
            self._occurrences.counts[slots, taken] += 1
            self._occurrences.seen[slots, taken] = True
        self.table.advance(rows)
        self._count_down(plan.sequences)
        ranks = None if plan.report is None else _rank(logits, tokens, plan.report)
        return SampledTokens.from_tokens(tokens, peaks, plan.sequences, ranks)

    def _choose(
        self, logits: torch.Tensor, scores: torch.Tensor | None, plan: Plan, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and peaks of the logits as they came; scores: [edited, vocab] float32, which stand for the logits."""
        if plan.drawn and self._draw_rows is not None:
            others = rows if plan.edit is None else rows.index_fill(0, plan.edit.places, self.table.padding_row)
            tokens, peaks = self._draw_rows(logits, others, self.table)
            if scores is not None and plan.edit is not None:
                tokens[plan.edit.places] = self._draw_rows(scores, rows[plan.edit.places], self.table)[0]
            return tokens, peaks
        peaks, tokens = self._argmax(logits)
        if scores is not None and plan.edit is not None:
            tokens[plan.edit.places] = self._argmax(scores)[1]
        if plan.draw is not None:
            drawing = logits[plan.draw.rows].float()
            if scores is not None and plan.draw.edited is not None:
                among_drawing, among_edited = plan.draw.edited
                drawing[among_drawing] = scores[among_edited]
            tokens[plan.draw.rows] = _draw(drawing, plan.draw, self.table.outputs[rows[plan.draw.rows]])
        return tokens, peaks

    def _edit(self, scores: torch.Tensor, edit: Edit, rows: torch.Tensor) -> torch.Tensor:
        """Bias, min_tokens and penalties; scores: [edited, vocab] float32, overwritten; rows: [edited]."""
        if (bias := edit.bias) is not None:
            scores.index_put_((bias.rows, bias.tokens), bias.values, accumulate=True)
        if (forbidden := edit.forbidden) is not None:
            place = (forbidden.rows, forbidden.tokens)
            early = self.table.outputs[rows[forbidden.rows]] < forbidden.until
            scores.index_put_(place, scores[place].masked_fill(early, -float("inf")))
        if (penalties := edit.penalties) is not None:
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

    def _count_down(self, sequences: tuple[int, ...]) -> None:
        """One token less to min_tokens. Only `sample` need count: it alone serves sequences that are held."""
        for number in self._held.keys() & set(sequences) if self._held else ():
            self._held[number] -= 1
            if self._held[number] == 0:
                del self._held[number]
                self._plan = None
                if not _always_full(self._sequences[number]):
                    self._full.discard(number)

    def _find_plan(self, numbers: tuple[int, ...]) -> Plan:
        if self._plan is None or self._plan.sequences != numbers:
            unknown = [str(number) for number in numbers if number not in self._sequences]
            if unknown:
                raise ExecutorError(
                    f"the sampler was not told of sequence {', '.join(unknown)}, or was told to forget it"
                )
            self._plan = self._planner.plan(numbers, [self._sequences[number] for number in numbers], self._held)
        return self._plan


def prompt_logprobs(logits: torch.Tensor, next_tokens: torch.Tensor, count: int) -> tuple[TokenLogprobs, ...]:
    """Log probability of the token that followed each position, and of the `count` likeliest ones; waits.

    logits: [rows, vocab]; next_tokens: [rows] int64.
    """
    entries: list[TokenLogprobs] = []
    for some, tokens in zip(torch.split(logits, _ROWS_AT_ONCE), torch.split(next_tokens, _ROWS_AT_ONCE), strict=True):
        chosen: list[int] = tokens.tolist()
        entries += to_entries(chosen, [count] * len(chosen), *rank_tokens(some, tokens, count))
    return tuple(entries)


def _always_full(sequence: SequenceState) -> bool:
    """Whether a sequence takes more than the table holds, whatever it has put out."""
    return bool(sequence.params.logit_bias) or sequence.slot is not None or sequence.params.logprobs is not None


def _argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the greatest logit of each row, [rows] float32, NaN where any is NaN; the first token of it, [rows] int64)."""
    peaks, tokens = logits.max(dim=-1)
    return peaks.float(), tokens


def _draw(scores: torch.Tensor, plan: Draw, positions: torch.Tensor) -> torch.Tensor:
    """Temperature, top_k, top_p, min_p and the draw: [rows that draw] int64.

    scores: [rows that draw, vocab] float32; positions: [rows that draw] int64.
    """
    # The likeliest token stands at 0: no temperature can make it overflow, and min_p is a plain bound.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / plan.temperature
    least = torch.full_like(plan.temperature, -float("inf")) if plan.min_p is None else plan.min_p
    for cutoff in plan.cutoffs:
        found = cutoffs(scores[cutoff.members], cutoff.top_k, cutoff.top_p, cutoff.widest)
        least = least.index_copy(0, cutoff.members, torch.maximum(least[cutoff.members], found))
    if plan.cutoffs or plan.min_p is not None:
        scores = scores.masked_fill(scores < least, -float("inf"))
    return draw(scores, uniforms(plan.keys, positions))


def _rank(logits: torch.Tensor, tokens: torch.Tensor, report: Report) -> Ranks:
    chosen, ranks, best, best_tokens = rank_tokens(logits[report.rows], tokens[report.rows], max(report.counts))
    return Ranks(report=report, chosen=chosen, ranks=ranks, best=best, best_tokens=best_tokens)
