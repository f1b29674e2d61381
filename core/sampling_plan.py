"""What one batch asks of its tokens, gathered into tensors once and used while the same sequences follow each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, frozen

from engine.core.sampling_ops import WIDEST_TOP_K, mix
from engine.core.types import SamplingParams

_COLDEST = 1e-5
_STRONGEST = 1e30
"""A bias beyond it would be infinite in float32, and infinity less infinity is no score."""


@define(kw_only=True)
class SequenceState:
    """What the host knows of one sequence."""

    params: SamplingParams
    outputs: int
    """Sampled before the present plan was made."""
    forbidden: tuple[int, ...]
    """Tokens ruled out until min_tokens."""
    slot: int | None
    """Row of the occurrence counts, for a sequence with penalties."""

    @property
    def greedy(self) -> bool:
        """Whether its token is simply the likeliest."""
        return self.params.temperature < _COLDEST or self.params.top_k == 1


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


@frozen(kw_only=True)
class Report:
    """Rows that want log probabilities."""

    rows: torch.Tensor
    host_rows: tuple[int, ...]
    counts: tuple[int, ...]


@define(kw_only=True)
class Plan:
    """What one batch needs, as tensors; None for what nobody in it asked for."""

    sequences: tuple[int, ...]
    bias: Bias | None
    forbidden: Forbidden | None
    penalties: Penalties | None
    draw: Draw | None
    report: Report | None
    positions: torch.Tensor | None
    """[rows] int64: outputs so far, advanced on the device; None when nothing depends on it."""
    used: int = 0
    """How often this plan was used."""


class Planner:
    """Makes plans for one vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device

    def plan(self, sequences: tuple[int, ...], rows: Sequence[SequenceState]) -> Plan:
        """The plan for these sequences, in this order."""
        forbidden, draw = self._forbidden(rows), self._draw(rows)
        positions = None
        if forbidden is not None or draw is not None:
            positions = self._ints([row.outputs for row in rows])
        return Plan(
            sequences=sequences,
            bias=self._bias(rows),
            forbidden=forbidden,
            penalties=self._penalties(rows),
            draw=draw,
            report=self._report(rows),
            positions=positions,
        )

    def _bias(self, rows: Sequence[SequenceState]) -> Bias | None:
        entries = [(place, *pair) for place, row in enumerate(rows) for pair in row.params.logit_bias]
        if not entries:
            return None
        places, tokens, values = zip(*entries, strict=True)
        bounded = [min(max(value, -_STRONGEST), _STRONGEST) for value in values]
        return Bias(rows=self._ints(places), tokens=self._ints(tokens), values=self._floats(bounded))

    def _forbidden(self, rows: Sequence[SequenceState]) -> Forbidden | None:
        entries = [
            (place, token, row.params.min_tokens)
            for place, row in enumerate(rows)
            if row.outputs < row.params.min_tokens
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

    def _draw(self, rows: Sequence[SequenceState]) -> Draw | None:
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
        return Draw(
            rows=self._ints(places),
            keys=mix(self._ints([each.seed or 0 for each in params])),
            temperature=self._floats([each.temperature for each in params])[:, None],
            cutoffs=tuple(self._cutoff(params, members) for members in (selected, ordered) if members),
            min_p=min_p if any(each.min_p > 0 for each in params) else None,
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
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)
