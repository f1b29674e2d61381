"""What one batch asks of its tokens, gathered into tensors once and used while the same sequences follow each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from attrs import frozen

from engine.core.runner.transfer import send
from engine.core.sampling.ops import WIDEST_TOP_K, mix
from engine.core.types import SamplingParams

_STRONGEST = 1e30
"""A bias beyond it would be infinite in float32, and infinity less infinity is no score."""


@frozen(kw_only=True)
class SequenceState:
    """What the host knows of one sequence."""

    params: SamplingParams
    row: int
    """In the tables of the running sequences."""
    forbidden: tuple[int, ...]
    """Tokens ruled out until min_tokens."""
    slot: int | None
    """Row of the occurrence counts, for a sequence with penalties."""

    @property
    def greedy(self) -> bool:
        """Whether its token is simply the likeliest."""
        return self.params.greedy


@frozen(kw_only=True)
class Bias:
    """logit_bias, one entry a (row, token)."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


@frozen(kw_only=True)
class Forbidden:
    """min_tokens, one entry a (row, token)."""

    rows: torch.Tensor
    tokens: torch.Tensor
    until: torch.Tensor


@frozen(kw_only=True)
class Penalties:
    """Rows with penalties."""

    rows: torch.Tensor
    slots: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@frozen(kw_only=True)
class Edit:
    """Rows whose logits are changed before a token is chosen; the rows of its parts count among these."""

    places: torch.Tensor
    """[edited] int64, in the batch."""
    bias: Bias | None
    forbidden: Forbidden | None
    penalties: Penalties | None


@frozen(kw_only=True)
class Cutoff:
    """Rows with top_k or top_p that share one way to order their scores."""

    members: torch.Tensor
    """Places among the rows that draw."""
    top_k: torch.Tensor
    top_p: torch.Tensor
    widest: int


@frozen(kw_only=True)
class Draw:
    """Rows that draw."""

    rows: torch.Tensor
    keys: torch.Tensor
    temperature: torch.Tensor
    cutoffs: tuple[Cutoff, ...]
    min_p: torch.Tensor | None
    """Logarithms, [rows, 1]."""
    edited: tuple[torch.Tensor, torch.Tensor] | None
    """Of the rows that draw and are edited: places among those that draw, and among the edited."""


@frozen(kw_only=True)
class Report:
    """Rows that want log probabilities."""

    rows: torch.Tensor
    host_rows: tuple[int, ...]
    counts: tuple[int, ...]


@frozen(kw_only=True)
class Plan:
    """What one batch needs, as tensors; None for what nobody in it asked for."""

    sequences: tuple[int, ...]
    edit: Edit | None
    drawn: bool
    """Whether any row draws."""
    draw: Draw | None
    """How to; None for a sampler whose kernels read the table instead."""
    report: Report | None


class Planner:
    """Makes plans for one vocabulary on one device; fused: for kernels that read how to draw from the SamplingTable."""

    def __init__(self, vocab_size: int, device: torch.device, fused: bool) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._fused = fused

    def plan(self, sequences: tuple[int, ...], rows: Sequence[SequenceState], held: Collection[int]) -> Plan:
        """The plan for these sequences, in this order; held: those that have not yet put out their min_tokens."""
        edited = [
            place
            for place, (sequence, row) in enumerate(zip(sequences, rows, strict=True))
            if row.params.logit_bias or row.slot is not None or sequence in held
        ]
        return Plan(
            sequences=sequences,
            edit=self._edit(edited, [rows[place] for place in edited], [sequences[place] in held for place in edited]),
            drawn=not all(row.greedy for row in rows),
            draw=None if self._fused else self._draw(rows, edited),
            report=self._report(rows),
        )

    def _edit(self, places: list[int], rows: Sequence[SequenceState], held: Sequence[bool]) -> Edit | None:
        if not places:
            return None
        return Edit(
            places=self._ints(places),
            bias=self._bias(rows),
            forbidden=self._forbidden(rows, held),
            penalties=self._penalties(rows),
        )

    def _bias(self, rows: Sequence[SequenceState]) -> Bias | None:
        entries = [(place, *pair) for place, row in enumerate(rows) for pair in row.params.logit_bias]
        if not entries:
            return None
        places, tokens, values = zip(*entries, strict=True)
        bounded = [min(max(value, -_STRONGEST), _STRONGEST) for value in values]
        return Bias(rows=self._ints(places), tokens=self._ints(tokens), values=self._floats(bounded))

    def _forbidden(self, rows: Sequence[SequenceState], held: Sequence[bool]) -> Forbidden | None:
        entries = [
            (place, token, row.params.min_tokens)
            for place, row in enumerate(rows)
            if held[place]
            for token in row.forbidden
        ]
        if not entries:
            return None
        places, tokens, until = zip(*entries, strict=True)
        return Forbidden(rows=self._ints(places), tokens=self._ints(tokens), until=self._ints(until))

    def _penalties(self, rows: Sequence[SequenceState]) -> Penalties | None:
        members = [(place, row.slot, row.params) for place, row in enumerate(rows) if row.slot is not None]
        if not members:
            return None
        places, slots, params = zip(*members, strict=True)
        return Penalties(
            rows=self._ints(places),
            slots=self._ints(slots),
            repetition=self._floats([each.repetition_penalty for each in params])[:, None],
            presence=self._floats([each.presence_penalty for each in params])[:, None],
            frequency=self._floats([each.frequency_penalty for each in params])[:, None],
        )

    def _draw(self, rows: Sequence[SequenceState], edited: list[int]) -> Draw | None:
        places = [place for place, row in enumerate(rows) if not row.greedy]
        if not places:
            return None
        params = [rows[place].params for place in places]
        selected = [at for at, each in enumerate(params) if 0 < each.top_k <= min(WIDEST_TOP_K, self._vocab_size)]
        narrow = set(selected)
        ordered = [
            at
            for at, each in enumerate(params)
            if at not in narrow and (each.top_p < 1 or 0 < each.top_k < self._vocab_size)
        ]
        min_p = self._floats([each.min_p for each in params]).log()[:, None]
        drawn = {place: at for at, place in enumerate(places)}
        shared = [(drawn[place], at) for at, place in enumerate(edited) if place in drawn]
        return Draw(
            rows=self._ints(places),
            keys=mix(self._ints([each.seed or 0 for each in params])),
            temperature=self._floats([each.temperature for each in params])[:, None],
            cutoffs=tuple(self._cutoff(params, members) for members in (selected, ordered) if members),
            min_p=min_p if any(each.min_p > 0 for each in params) else None,
            edited=(self._ints([at for at, _ in shared]), self._ints([at for _, at in shared])) if shared else None,
        )

    def _cutoff(self, params: list[SamplingParams], members: list[int]) -> Cutoff:
        top_k = [min(params[at].top_k or self._vocab_size, self._vocab_size) for at in members]
        # The sum of all probabilities may round to 1 before the last token: without top_p, nothing may reach it.
        top_p = [params[at].top_p if params[at].top_p < 1 else 2.0 for at in members]
        return Cutoff(
            members=self._ints(members),
            top_k=self._ints(top_k)[:, None],
            top_p=self._floats(top_p)[:, None],
            widest=max(top_k),
        )

    def _report(self, rows: Sequence[SequenceState]) -> Report | None:
        members = [(place, row.params.logprobs) for place, row in enumerate(rows) if row.params.logprobs is not None]
        if not members:
            return None
        places, counts = zip(*members, strict=True)
        return Report(rows=self._ints(places), host_rows=places, counts=counts)

    def _ints(self, values: Sequence[int]) -> torch.Tensor:
        return send(torch.tensor(values, dtype=torch.int64), self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return send(torch.tensor(values, dtype=torch.float32), self._device)
