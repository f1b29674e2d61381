"""Runs a speculator on the device after each forward pass of the target: over the same rows, then to propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from engine.core.attention.base import GraphSlot
from engine.core.attention.batch import ForwardBatch
from engine.core.layers.hidden_states import HiddenStates
from engine.core.models.forward_pass import ForwardPass
from engine.core.runner.device_state import GroupState, join_passes
from engine.core.runner.drafter_graphs import DrafterGraphs
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.sampling.draft_rows import VerifiedDrafts
from engine.core.speculators.device import DeviceSpeculator, TargetRows
from engine.core.transfer import HostCopy, to_device
from engine.core.types import Step

if TYPE_CHECKING:
    from engine.core.runner.cuda_graphs import DecodeGraphs
    from engine.core.runner.graph_capture import GraphCapturer


@frozen(kw_only=True)
class Proposals:
    """Proposals of one step, on their way to the host."""

    tokens: HostCopy
    """The proposed tokens, one tensor: [sequences, drafts] int64."""
    room: npt.NDArray[np.int64]
    """[sequences]: tokens of each proposal that have a slot in the sequence's blocks, if none of its drafts is
    accepted. Tokens beyond have no meaning."""
    verified: VerifiedDrafts | None
    """Verified drafts of the last sequences; None: the step has no drafts."""

    def to_host(self) -> tuple[tuple[int, ...], ...]:
        """StepResult.proposals."""
        (tokens,) = self.tokens.wait()
        room = self.room
        if self.verified is not None:
            (accepted,) = self.verified.accepted.wait()
            room = room.copy()
            room[len(room) - len(accepted) :] -= accepted.numpy()
        rows = zip(tokens.tolist(), room.clip(min=0).tolist(), strict=True)
        return tuple(tuple(row[:count]) for row, count in rows)


@frozen(kw_only=True)
class ComputedRows:
    """The rows of one forward pass of the target, whose tokens are sampled."""

    batch: ForwardBatch
    logit_rows: torch.Tensor
    """[sampled] int64: the rows of the batch that were sampled from."""
    sampled: torch.Tensor
    """[sampled] int64: the token sampled from each of them."""
    sequences: Sequence[int]
    """Sequences that sample, without those with drafts."""
    verified: VerifiedDrafts | None
    """Verified drafts of the sequences whose rows come last; None: the step has no drafts."""


class Drafter:
    """A speculator on the device, its caches, and the passes that it computes.

    All its layers read the block tables of the target's first cache group.
    """

    def __init__(
        self,
        speculator: DeviceSpeculator[Any],
        groups: tuple[GroupState, ...],
        persistent_batch: PersistentBatch,
        *,
        max_len: int,
        scratch_block: int,
        hidden_states: HiddenStates | None = None,
    ) -> None:
        """groups: the speculator's cache groups. scratch_block: the block that tokens without a slot are written to.
        hidden_states: the target's hidden states that the speculator computes with; None: it needs none."""
        self._speculator = speculator
        self._looks_ahead = speculator.looks_ahead
        self._hidden_states = hidden_states
        self._graphs: DrafterGraphs | None = None
        self.groups = groups
        """Its cache groups."""
        self._pass = partial(_plan, groups)
        """Plans a batch. A partial of a function: with a bound method, the graphs would refer to this object, which
        refers to the graphs."""
        self._persistent_batch = persistent_batch
        self._device = persistent_batch.tables.device
        self._max_len = max_len
        self._scratch = scratch_block * persistent_batch.block_size

    @property
    def no_graphs(self) -> str | None:
        """Why CUDA graphs cannot hold the speculator's passes; None: they can."""
        return self._speculator.no_graphs

    def capture(self, decode: DecodeGraphs, capturer: GraphCapturer, on_progress: Callable[[int, int], None]) -> None:
        """Capture CUDA graphs of the speculator's passes. decode: the graphs of the target's decode steps."""
        graphs = DrafterGraphs(
            self._speculator,
            self._pass,
            decode.sizes,
            self._persistent_batch,
            max_len=self._max_len,
            scratch=self._scratch,
            hidden_states=self._hidden_states,
        )
        graphs.capture_all(decode.batch, capturer, on_progress)
        self._graphs = graphs

    def run(self, step: Step, rows: ComputedRows, *, propose: int) -> Proposals | None:
        """Compute the target's rows, then propose up to `propose` tokens for each sequence that samples. The persistent
        batch must have the tokens just sampled. None: `propose` is 0, or no sequence samples."""
        hidden = self._observe(step, rows)
        return self._propose(step, rows.sequences, rows.verified, hidden, rows.logit_rows, propose)

    def run_replayed(
        self, step: Step, decode: DecodeGraphs, verified: VerifiedDrafts | None, *, propose: int
    ) -> Proposals | None:
        """Compute the rows of a replayed decode step of the target, then propose as `run` does.

        Each row is one token of a decode or of a draft slice. The persistent batch already counts these tokens as
        computed.
        """
        persistent_batch, count = self._persistent_batch, step.decode_rows
        if self._graphs is not None:
            next_tokens = None
            if self._looks_ahead:
                newest = persistent_batch.last_tokens
                next_tokens = newest[decode.rows(count)] if verified is None else verified.sampled
            hidden = self._graphs.observe(count, next_tokens)
            return self._propose(step, step.decodes, verified, hidden, None, propose)
        table_rows = persistent_batch.rows((*step.decodes, *step.draft_sequences))
        positions = persistent_batch.computed[table_rows] - 1
        positions[len(step.decodes) :] = [at for part in step.drafts for at, _ in enumerate(part.tokens, part.start)]
        rows = self.single_rows(table_rows, positions, decode.tokens(count), step.decodes, verified)
        return self.run(step, rows, propose=propose)

    def _propose(
        self,
        step: Step,
        sequences: Sequence[int],
        verified: VerifiedDrafts | None,
        hidden: torch.Tensor,
        logit_rows: torch.Tensor | None,
        propose: int,
    ) -> Proposals | None:
        """Propose tokens for all sequences that sample. sequences: those without drafts. hidden: of all rows.
        logit_rows: the rows that were sampled from; None: all."""
        num_before = len(sequences)
        sequences = (*sequences, *(part.sequence for part in step.drafts))
        if not (propose and sequences):
            return None
        persistent_batch = self._persistent_batch
        table_rows = persistent_batch.rows(sequences)
        positions = persistent_batch.computed[table_rows]
        positions[num_before:] = [part.start + 1 for part in step.drafts]  # if no draft is accepted
        limits = np.minimum(persistent_batch.capacities(sequences), self._max_len)
        room = limits - positions + self._looks_ahead
        device_rows, device_positions, device_limits = to_device([table_rows, positions, limits], self._device)
        if verified is not None:
            first = verified.rows.first + verified.num_accepted
            device_positions[num_before:] += verified.num_accepted
            last = torch.cat((torch.arange(num_before, device=self._device), first))
            hidden = hidden[last if logit_rows is None else logit_rows[last]]
        elif logit_rows is not None:
            hidden = hidden[logit_rows]
        tokens = persistent_batch.last_tokens[device_rows]
        if self._graphs is not None and len(sequences) <= self._graphs.max_rows:
            found = self._graphs.propose(device_rows, device_positions, device_limits, tokens, hidden, propose)
        else:
            if verified is not None:  # without graphs, backends plan by positions on the host
                (accepted,) = verified.accepted.wait()
                positions[num_before:] += accepted.numpy()
            found = self._propose_without_graphs(table_rows, device_rows, positions, limits, tokens, hidden, propose)
        return Proposals(tokens=HostCopy.begin(torch.stack(found, 1)), room=room, verified=verified)

    def _propose_without_graphs(
        self,
        rows: npt.NDArray[np.int64],
        device_rows: torch.Tensor,
        positions: npt.NDArray[np.int64],
        limits: npt.NDArray[np.int64],
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        count: int,
    ) -> list[torch.Tensor]:
        """Propose as DrafterGraphs.propose does, kernel by kernel."""
        found = []
        if self._looks_ahead:
            tokens = self._speculator.choose(hidden)
            found.append(tokens)
        for place in range(count - len(found)):
            batch = self._decode_batch(rows, device_rows, positions + place, limits, tokens)
            hidden = self._speculator.advance(self._pass(batch), hidden)
            tokens = self._speculator.choose(hidden)
            found.append(tokens)
        return found

    def single_rows(
        self,
        table_rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        tokens: torch.Tensor,
        sequences: Sequence[int],
        verified: VerifiedDrafts | None,
    ) -> ComputedRows:
        """The rows of a pass in which each row is one token at the end of its own context, as in a decode graph.

        table_rows, positions: of each row, in the persistent batch and in its sequence; tokens: [rows] int64.
        """
        (device_rows,) = to_device([table_rows], self._device)
        batch = self._decode_batch(table_rows, device_rows, positions, positions + 1, tokens)
        sampled = self._persistent_batch.last_tokens[device_rows] if verified is None else verified.sampled
        return ComputedRows(
            batch=batch, logit_rows=batch.logit_rows, sampled=sampled, sequences=sequences, verified=verified
        )

    def _observe(self, step: Step, rows: ComputedRows) -> torch.Tensor:
        """Hidden states of all rows: [tokens, size]."""
        next_tokens = self._next_tokens(step, rows) if self._looks_ahead else None
        hidden = None if self._hidden_states is None else self._hidden_states.rows(len(rows.batch.tokens))
        return self._speculator.observe(self._pass(rows.batch), TargetRows(hidden=hidden, next_tokens=next_tokens))

    def _next_tokens(self, step: Step, rows: ComputedRows) -> torch.Tensor:
        """The token after each row's token: the next known one within a prompt, else the sampled one."""
        tokens = rows.batch.tokens.roll(-1)
        known = [
            self._persistent_batch.known(chunk.sequence, end, end + 1)
            for chunk in step.chunks
            if not chunk.sample and (end := chunk.start + chunk.count)
        ]
        if known:
            ends = np.cumsum([1] * len(step.decodes) + [chunk.count for chunk in step.chunks])[len(step.decodes) :] - 1
            unsampled = ends[[not chunk.sample for chunk in step.chunks]]
            places, values = to_device([unsampled, np.concatenate(known)], self._device)
            tokens.index_copy_(0, places, values)
        return tokens.index_copy_(0, rows.logit_rows, rows.sampled)

    def _decode_batch(
        self,
        rows: npt.NDArray[np.int64],
        device_rows: torch.Tensor,
        positions: npt.NDArray[np.int64],
        limits: npt.NDArray[np.int64],
        tokens: torch.Tensor,
    ) -> ForwardBatch:
        """A batch of one token per sequence. rows: of the persistent batch; positions: of the tokens; limits: number of
        tokens that each sequence has slots for; a token beyond goes to the scratch slot, and its result has no
        meaning."""
        persistent_batch, size, count = self._persistent_batch, self._persistent_batch.block_size, len(rows)
        placed = positions < limits
        at = np.where(placed, positions, 0)
        width = int(at.max()) // size + 1
        slots = persistent_batch.host_tables[rows, at // size].astype(np.int64) * size + at % size
        slots[~placed] = self._scratch
        ends, lengths = (at + 1).astype(np.int32), np.ones(count, np.int32)
        starts = np.arange(count + 1, dtype=np.int32)
        sent = to_device([at, slots, starts, ends], self._device)
        return ForwardBatch(
            tokens=tokens,
            positions=sent[0],
            slots=sent[1],
            query_starts=sent[2],
            context_lens=sent[3],
            block_tables=persistent_batch.tables[device_rows, :width],
            logit_rows=torch.arange(count, device=self._device),
            num_decodes=count,
            query_lens_host=lengths,
            context_lens_host=ends,
            block_tables_host=partial(persistent_batch.block_tables, rows, width),
        )


def _plan(groups: Sequence[GroupState], batch: ForwardBatch, slot: GraphSlot | None = None) -> ForwardPass:
    """Plan a batch in every group of the speculator. slot: of a CUDA graph's batch; None: no graph."""
    passes = [group.plan(batch, slot) for group in groups]
    if len(passes) == 1:
        return passes[0]
    if not passes:
        nothing: Any = None
        return ForwardPass(batch=batch, attention=nothing, plan=None, pool=nothing)
    return join_passes(batch, passes)
