"""The passes of a speculator on the device as CUDA graphs, one per batch size: after a replayed decode step of the
target, and for each token of a proposal."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import define

from engine.core.attention.base import GraphSlot
from engine.core.attention.batch import ForwardBatch
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.speculators.device import DeviceSpeculator, TargetRows

if TYPE_CHECKING:
    from engine.core.layers.hidden_states import HiddenStates
    from engine.core.models.forward_pass import ForwardPass
    from engine.core.runner.graph_capture import GraphCapturer


@define
class _Graph:
    """A captured pass."""

    replay: Callable[[], None]
    hidden: torch.Tensor
    """[batch, size]: what the pass returns."""
    run: ForwardPass
    """Kept as long as the graph: its plan may own memory that the graph reads."""


class DrafterGraphs:
    """Captures and replays passes of one token per sequence. All tensors that a graph uses keep their addresses.

    A pass after a step of the target reads the batch of the target's graph, and the hidden states that the target has
    stored. A pass for a proposal reads its rows, positions and tokens from its own tensors, and advances them: so the
    host sends nothing between the tokens of a proposal, and need not know how many drafts were accepted.
    """

    def __init__(
        self,
        speculator: DeviceSpeculator[Any],
        plan: Callable[[ForwardBatch, GraphSlot], ForwardPass],
        sizes: Sequence[int],
        persistent_batch: PersistentBatch,
        *,
        max_len: int,
        scratch: int,
        hidden_states: HiddenStates | None,
    ) -> None:
        """plan: plans a batch in all cache groups of the speculator. sizes: batch sizes of the target's graphs,
        ascending. scratch: the slot for tokens that have none."""
        self._speculator = speculator
        self._plan = plan
        self._sizes = sizes
        self._persistent_batch = persistent_batch
        self._max_len = max_len
        self._scratch = scratch
        self._hidden_states = hidden_states
        self.max_rows = rows = sizes[-1]
        """Sequences of the largest graph."""
        device = persistent_batch.tables.device

        def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        self._next_tokens, self._observed_positions = tensor(torch.int64), tensor(torch.int64)
        self._rows, self._positions, self._limits = (tensor(torch.int64) for _ in range(3))
        self._tokens, self._slots, self._places = (tensor(torch.int64) for _ in range(3))
        self._context_lens = tensor(torch.int32)
        self._tables = tensor(torch.int32, persistent_batch.tables.shape[1])
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(rows, device=device)
        self._hidden = torch.zeros(0, device=device)
        """[max rows, size], once a pass was captured."""
        self._observations: dict[int, _Graph] = {}
        self._advances: dict[int, _Graph] = {}
        self._choices: dict[int, Callable[[], None]] = {}
        """Replays of graphs that choose the first token; only for a speculator that looks ahead."""

    @torch.inference_mode()
    def capture_all(
        self,
        batch: Callable[[int], ForwardBatch],
        capturer: GraphCapturer,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """Capture both passes for every batch size, the largest first, whose memory serves the others.

        batch: the batch that the target's graph of a size reads.
        """
        for done, size in enumerate(reversed(self._sizes)):
            on_progress(done, len(self._sizes))
            self._observations[size] = self._capture_observation(batch(size), size, capturer)
            if not len(self._hidden):
                made = self._observations[size].hidden
                self._hidden = torch.zeros(self.max_rows, made.shape[1], dtype=made.dtype, device=made.device)
            self._advances[size] = self._capture_advance(size, capturer)
            if self._speculator.looks_ahead:
                self._choices[size] = self._capture_choice(size, capturer)

    def observe(self, count: int, next_tokens: torch.Tensor | None) -> torch.Tensor:
        """Compute the rows of the target's replay just launched: [count, size], valid until the next replay.

        next_tokens: [count] int64, the token after each row, for a speculator that looks ahead.
        """
        if next_tokens is not None:
            self._next_tokens[:count].copy_(next_tokens)
        graph = self._observations[self._size(count)]
        graph.replay()
        return graph.hidden[:count]

    def propose(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        limits: torch.Tensor,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        count: int,
    ) -> list[torch.Tensor]:
        """`count` proposed tokens, each [sequences] int64.

        rows, positions, limits: [sequences] int64, as in Drafter._decode_batch; tokens: [sequences] int64, the newest
        tokens, which a speculator that looks ahead has already computed; hidden: [sequences, size]; all on the device.
        """
        number = len(rows)
        size = self._size(number)
        for tensor, values in (
            (self._rows, rows),
            (self._positions, positions),
            (self._limits, limits),
            (self._tokens, tokens),
            (self._hidden, hidden),
        ):
            tensor[:number].copy_(values)
        self._rows[number:size].fill_(self._persistent_batch.padding_row)
        self._limits[number:size].zero_()
        found = []
        if self._choices:
            self._choices[size]()
            found.append(self._tokens[:number].clone())
        replay = self._advances[size].replay
        while len(found) < count:
            replay()
            found.append(self._tokens[:number].clone())
        return found

    def _size(self, count: int) -> int:
        """Batch size of the graphs for `count` sequences."""
        return self._sizes[bisect_left(self._sizes, count)]

    def _capture_observation(self, batch: ForwardBatch, size: int, capturer: GraphCapturer) -> _Graph:
        batch.groups = ()
        batch.positions = self._observed_positions[:size]
        run = self._plan(batch, GraphSlot(num_sequences=size))
        target = TargetRows(
            hidden=None if self._hidden_states is None else self._hidden_states.rows(size),
            next_tokens=self._next_tokens[:size] if self._speculator.looks_ahead else None,
        )

        def work() -> torch.Tensor:
            batch.positions.copy_(batch.context_lens - 1)
            return self._speculator.observe(run, target)

        batch.context_lens.fill_(1)
        replay, hidden = capturer.capture(work)
        return _Graph(replay, hidden, run)

    def _capture_advance(self, size: int, capturer: GraphCapturer) -> _Graph:
        batch = self._batch(size)
        run = self._plan(batch, GraphSlot(num_sequences=size))
        self._rows[:size].fill_(self._persistent_batch.padding_row)
        self._limits[:size].zero_()

        def work() -> torch.Tensor:
            self._begin(batch, size)
            hidden = self._speculator.advance(run, self._hidden[:size])
            tokens = self._speculator.choose(hidden)
            self._hidden[:size].copy_(hidden)
            self._tokens[:size].copy_(tokens)
            return self._positions[:size].add_(1)

        replay, _ = capturer.capture(work)
        return _Graph(replay, self._hidden[:size], run)

    def _capture_choice(self, size: int, capturer: GraphCapturer) -> Callable[[], None]:
        def work() -> torch.Tensor:
            return self._tokens[:size].copy_(self._speculator.choose(self._hidden[:size]))

        return capturer.capture(work)[0]

    def _begin(self, batch: ForwardBatch, size: int) -> None:
        """Fill the batch from rows and positions; a token beyond its row's limit is written to the scratch slot."""
        positions, block_size = self._positions[:size], self._persistent_batch.block_size
        placed = positions < self._limits[:size]
        batch.positions.copy_(positions.where(placed, 0))
        batch.block_tables.copy_(self._persistent_batch.tables[self._rows[:size]])
        blocks = batch.block_tables.gather(1, (batch.positions // block_size)[:, None]).squeeze(1)
        slots = blocks * block_size + batch.positions % block_size
        batch.slots.copy_(slots.where(placed, self._scratch))
        batch.context_lens.copy_(batch.positions + 1)

    def _batch(self, size: int) -> ForwardBatch:
        return ForwardBatch(
            tokens=self._tokens[:size],
            positions=self._places[:size],
            slots=self._slots[:size],
            query_starts=self._query_starts[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._tables[:size],
            logit_rows=self._all_rows[:size],
            num_decodes=size,
            query_lens_host=np.ones(size, np.int32),
            context_lens_host=np.full(size, self._max_len, np.int32),
            block_tables_host=np.zeros((size, self._tables.shape[1]), np.int32),
        )
