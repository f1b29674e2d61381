"""Decode steps as CUDA graphs, one per batch size and sampling path, from the embedding to the sampled token.

A replay reads its sequences' rows, positions and block tables from fixed tensors, and advances the positions. While the
same sequences follow each other, the host sends nothing but newly assigned blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from engine.core.attention.base import GraphSlot
from engine.core.attention.batch import ForwardBatch
from engine.core.models.forward_pass import ForwardPass
from engine.core.runner.build_batch import group_batch
from engine.core.runner.draft_batch import DraftBatch
from engine.core.runner.graph_capture import GraphCapturer, weak_ref_tensor
from engine.core.runner.graph_sizes import batch_sizes, recorded_sizes
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.schedulers.policy import MAX_DECODE_STEPS
from engine.core.transfer import to_device

if TYPE_CHECKING:
    from engine.core.runner.device_state import DeviceState
    from engine.core.runner.lap_timer import LapTimer
    from engine.core.sampling.base import CapturedTokens, PathName, SamplingPath
    from engine.core.sampling.draft_rows import VerifiedDrafts
    from engine.core.types import Step

HOST_LINES = 2 * MAX_DECODE_STEPS
"""Replays whose tokens fit in the pinned host buffer: the maximum of two steps in flight."""


@define
class _Graph:
    """A captured decode step."""

    replay: Callable[[], None]
    logits: torch.Tensor | None
    """[batch, vocabulary], where the graph ends with logits; None where it ends with tokens."""
    run: ForwardPass
    """The pass that was captured. Kept as long as the graph: its plan may own memory that the graph reads."""


class DecodeGraphs:
    """Captures and replays decode steps. All tensors that a graph uses keep their addresses."""

    def __init__(
        self,
        state: DeviceState,
        capturer: GraphCapturer,
        *,
        max_running: int,
        max_len: int,
        hidden_size: int,
        dtype: torch.dtype,
        fused: bool,
        windows: Sequence[int | None] = (None,),
        max_drafts: int = 0,
    ) -> None:
        """hidden_size, dtype: of the hidden states that the model returns. windows: of each cache group with blocks.
        max_drafts: of one sequence in a step; 0: steps have none."""
        self._model = state.model
        self._state = state
        self._persistent_batch = persistent_batch = state.persistent_batch
        self._sampler = state.sampler
        self._max_len = max_len
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._fused = fused
        self._sizes = batch_sizes(max_running)
        self._size_of = np.searchsorted(self._sizes, np.arange(max_running + 1))
        device = persistent_batch.tables.device
        self._device = device

        def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(max_running, *shape, dtype=dtype, device=device)

        self._rows, self._positions = tensor(torch.int64), tensor(torch.int64)
        self._tokens = tensor(torch.int64)
        self._sampled, self._max_logits = tensor(torch.int64), tensor(torch.float32)
        self._context_lens = tensor(torch.int32)
        tables = persistent_batch.group_tables
        self._slots = [tensor(torch.int64) for _ in tables]
        """Per cache group with blocks."""
        self._tables = [tensor(torch.int32, tables.shape[2]) for _ in tables]
        """Per cache group with blocks."""
        self._windows = list(windows) or [None]
        self._query_starts = torch.arange(max_running + 1, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(max_running, device=device)
        self._rows.fill_(persistent_batch.padding_row)
        pinned = device.type == "cuda"
        self._host_tokens = torch.zeros(HOST_LINES, max_running, dtype=torch.int64, pin_memory=pinned)
        self._host_max_logits = torch.zeros(HOST_LINES, max_running, dtype=torch.float32, pin_memory=pinned)
        self._num_replays = torch.zeros(1, dtype=torch.int64, device=device)
        """Replays that have written a line of the host buffer, counted on the device."""
        self._num_replays_launched = 0
        """The same count on the host, which runs ahead of the device."""
        self._draft_batch: DraftBatch | None = None
        if max_drafts:
            self._draft_batch = DraftBatch(
                persistent_batch,
                state.sampler.table,
                rows=self._rows,
                positions=self._positions,
                max_drafts=max_drafts,
                fused=fused,
            )
        self._graphs: dict[tuple[int, PathName], _Graph] = {}
        self._capturer = capturer
        self._current: tuple[int, ...] = ()
        self._host_rows = np.zeros(0, np.int64)

    @torch.inference_mode()
    def run_without_graphs(self) -> None:
        """Launch the kernels of the captures once, kernel by kernel, for padding rows."""
        first, *others = self._sampler.graph_paths
        for size in recorded_sizes(self._sizes):
            self._pad(size)
            run = self._state.graph_pass(self.batch(size), GraphSlot(num_sequences=size))
            self._step(run, size, first)
            for path in others:
                captured = self._sample_alone(size, path)
                if not isinstance(captured, torch.Tensor):
                    self._end(self._rows[:size], captured)

    def capture_all(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture each sampling path for every batch size, the largest first, whose memory serves the others.

        on_progress: called with the number of captures done and the number of all.
        """
        paths = self._sampler.graph_paths
        for done, size in enumerate(reversed(self._sizes)):
            on_progress(done * len(paths), len(self._sizes) * len(paths))
            self._capture(size, paths)
        if self._draft_batch is not None and self._fused and self._device.type == "cuda":
            self._draft_batch.capture(self._capturer)

    @property
    def num_captured(self) -> int:
        """Number of graphs captured so far."""
        return len(self._graphs)

    def size(self, count: int) -> int:
        """Batch size of the graph that decodes `count` sequences."""
        return self._sizes[int(self._size_of[count])]

    def invalidate(self) -> None:
        """Note that sequences advanced outside the graphs: the next replay needs all rows and positions again."""
        self._current = ()

    def run(self, decodes: tuple[int, ...], iterations: int, timer: LapTimer) -> list[SampledTokens]:
        """Replay one decode step per iteration for these sequences of the persistent batch; one result per iteration.

        timer: its phases are ended here.
        """
        size = self.size(len(decodes))
        path = self._sampler.graph_path(decodes)
        graph = self._graphs.get((size, path.name))
        if graph is None:
            [graph] = self._capture(size, [path])
        self._send(decodes, size, iterations)
        timer.end("prepare")
        samples = []
        for _ in range(iterations):
            graph.replay()
            timer.end("launch")
            samples.append(self._collect(decodes, graph))
            timer.end("sample")
        return samples

    def _send(self, decodes: tuple[int, ...], size: int, iterations: int) -> None:
        """Send newly assigned blocks to the device; rows and positions too if other sequences decode than before."""
        persistent_batch = self._persistent_batch
        arrays: list[npt.NDArray[Any]] = persistent_batch.take_changes()
        changes = len(arrays)
        moved = self._current is not decodes and self._current != decodes
        if moved:
            self._host_rows = host_rows = persistent_batch.rows(decodes)
            rows = np.full(size, persistent_batch.padding_row, np.int64)
            rows[: len(decodes)] = host_rows
            positions = np.zeros(size, np.int64)
            positions[: len(decodes)] = persistent_batch.computed[host_rows]
            arrays += [rows, positions]
        self._current = decodes
        persistent_batch.computed[self._host_rows] += iterations
        if not arrays:
            return
        sent = to_device(arrays, self._device)
        persistent_batch.apply(sent[:changes])
        if moved:
            self._rows[:size].copy_(sent[-2])
            self._positions[:size].copy_(sent[-1])

    def fits(self, step: Step) -> bool:
        """Whether a step has a graph: without chunks, and with a row for each token of its draft slices."""
        if step.chunks or not step.drafts:
            return not step.chunks
        if self._draft_batch is None:
            return False
        return step.decode_rows <= self._sizes[-1]

    def verify(self, step: Step, timer: LapTimer) -> tuple[SampledTokens, VerifiedDrafts]:
        """Replay one decode step for sequences with and without drafts.

        Each token of a draft slice has a row of its own, which reads the blocks of its sequence. Since a layer writes
        all keys and values before its attention reads any, a row sees those of the tokens before it in its slice.
        """
        batch, sampler, plain = self._persistent_batch, self._sampler, len(step.decodes)
        sequences = (*step.decodes, *(part.sequence for part in step.drafts for _ in part.tokens))
        count, size, path = len(sequences), self.size(len(sequences)), sampler.graph_path(sequences)
        graph = self._graphs.get((size, path.name)) or self._capture(size, [path])[0]
        self.invalidate()
        assert self._draft_batch is not None, "a step with drafts that `fits`"
        drafts, owners = self._draft_batch.send(step, size)
        timer.end("prepare")
        graph.replay()
        timer.end("launch")
        if graph.logits is None:
            sampled = self._tokens_of_replay(count)
            chosen = batch.last_tokens[self._rows[:count]]
        else:
            own_rows = torch.cat((self._rows[:plain], owners))
            sampled = sampler.sample(graph.logits[:count], sequences, own_rows, drafts)
            chosen = sampled.tokens
            batch.set_last_tokens(own_rows[:plain], chosen[:plain])
        verified = sampler.verify(drafts, chosen, batch.last_tokens)
        timer.end("sample")
        return sampled, verified

    @property
    def sizes(self) -> Sequence[int]:
        """Batch sizes of the graphs, ascending."""
        return self._sizes

    def rows(self, count: int) -> torch.Tensor:
        """Rows of the persistent batch that the replay just launched computes: [count] int64; overwritten like
        `tokens`."""
        return self._rows[:count]

    def tokens(self, count: int) -> torch.Tensor:
        """The tokens that the first `count` rows of the replay just launched compute: [count] int64; the next replay
        overwrites them."""
        return self._tokens[:count]

    def _tokens_of_replay(self, count: int) -> SampledTokens:
        """The tokens that the replay just launched samples, on their way to the host."""
        if not self._fused:
            return SampledTokens.from_tokens(self._sampled[:count], self._max_logits[:count])
        line = self._num_replays_launched % HOST_LINES
        self._num_replays_launched += 1
        tokens, max_logits = self._host_tokens[line, :count], self._host_max_logits[line, :count]
        return SampledTokens.from_host(tokens, max_logits, self._device)

    def _collect(self, decodes: tuple[int, ...], graph: _Graph) -> SampledTokens:
        """The tokens of the replay just launched, on their way to the host."""
        count = len(decodes)
        if graph.logits is None:
            return self._tokens_of_replay(count)
        rows = self._rows[:count]
        sampled = self._sampler.sample(graph.logits[:count], decodes, rows)
        self._persistent_batch.set_last_tokens(rows, sampled.tokens)
        return sampled

    @torch.inference_mode()
    def run_without_graph(self, size: int, path: SamplingPath, within: AbstractContextManager[object]) -> None:
        """Run the kernels of one graph without the graph, for padding rows: no sequence advances.

        within: entered for these kernels and no others. Must not be called while a step is in flight. Raises KeyError
        if there is no such graph.
        """
        run = self._graphs[size, path.name].run
        self._pad(size)
        with within:
            self._step(run, size, path)
        self._num_replays.fill_(self._num_replays_launched)

    def _pad(self, size: int) -> None:
        """Fill a batch with padding rows."""
        self.invalidate()
        self._rows[:size].fill_(self._persistent_batch.padding_row)
        self._positions[:size].zero_()

    @torch.inference_mode()
    def _capture(self, size: int, paths: Sequence[SamplingPath]) -> list[_Graph]:
        """Capture the decode steps of a batch of padding rows, one for each sampling path."""
        self._pad(size)
        run = self._state.graph_pass(self.batch(size), GraphSlot(num_sequences=size))
        endings = [partial(self._finish, size, path) for path in paths]

        def begin() -> torch.Tensor:
            return self._forward(run, size)

        def warm_up() -> None:
            hidden = begin()
            for ending in endings:
                ending(hidden)

        captured = self._capturer.capture_alike(begin, endings, warm_up)
        self._num_replays.fill_(self._num_replays_launched)
        graphs = [
            _Graph(replay, None if logits is None else weak_ref_tensor(logits), run) for replay, logits in captured
        ]
        self._graphs.update({(size, path.name): graph for path, graph in zip(paths, graphs, strict=True)})
        return graphs

    def _sample_alone(self, size: int, path: SamplingPath) -> CapturedTokens | torch.Tensor:
        """Sample from hidden states of zeros, by the kernels of a graph."""
        hidden = torch.zeros(size, self._hidden_size, dtype=self._dtype, device=self._device)
        return path.capture(self._model, hidden, self._rows[:size])

    def batch(self, size: int) -> ForwardBatch:
        """The batch that the graphs of a size read. Each replay fills its tensors, then advances its positions."""
        batch = ForwardBatch(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
            slots=self._slots[0][:size],
            query_starts=self._query_starts[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._tables[0][:size],
            logit_rows=self._all_rows[:size],
            num_decodes=size,
            query_lens_host=np.ones(size, np.int32),
            context_lens_host=np.full(size, self._max_len, np.int32),
            block_tables_host=np.zeros((size, self._tables[0].shape[1]), np.int32),
            state_rows=self._rows[:size],
        )
        num_groups = len(self._state.groups)
        if num_groups > 1:
            batch.groups = tuple(
                group_batch(
                    batch,
                    slots=self._slots[table][:size],
                    block_tables=self._tables[table][:size],
                    block_tables_host=batch.block_tables_host,
                )
                for table in (min(number, len(self._tables) - 1) for number in range(num_groups))
            )
        return batch

    def _step(self, run: ForwardPass, size: int, path: SamplingPath) -> torch.Tensor | None:
        """Run one decode step; returns the logits where the sampling path cannot finish inside the graph."""
        return self._finish(size, path, self._forward(run, size))

    def _forward(self, run: ForwardPass, size: int) -> torch.Tensor:
        """The part of a decode step that all sampling paths share; returns the hidden states."""
        self._begin(run.batch, self._rows[:size])
        return self._model.forward(run)

    def _finish(self, size: int, path: SamplingPath, hidden: torch.Tensor) -> torch.Tensor | None:
        """The rest of a decode step, after `_forward`, for a sampling path; returns what `_step` does."""
        rows = self._rows[:size]
        captured = path.capture(self._model, hidden, rows)
        if isinstance(captured, torch.Tensor):
            self._positions[:size].add_(rows != self._persistent_batch.padding_row)
            return captured
        self._end(rows, captured)
        return None

    def _begin(self, batch: ForwardBatch, rows: torch.Tensor) -> None:
        """Fill the batch's tensors from the persistent batch."""
        persistent_batch, size = self._persistent_batch, len(rows)
        if self._fused:
            from engine.ops.sampling.decode_step import begin_decode

            for group, window in enumerate(self._windows):
                begin_decode(
                    rows,
                    batch.positions,
                    persistent_batch.last_tokens,
                    persistent_batch.group_tables[group],
                    tokens=batch.tokens,
                    slots=self._slots[group][:size],
                    context_lens=batch.context_lens,
                    tables=self._tables[group][:size],
                    block_size=persistent_batch.block_size,
                    window=window,
                )
            return
        blocks, offsets = batch.positions // persistent_batch.block_size, batch.positions % persistent_batch.block_size
        for group in range(len(self._windows)):
            tables = self._tables[group][:size]
            tables.copy_(persistent_batch.group_tables[group, rows])
            slots = tables.gather(1, blocks[:, None]).squeeze(1) * persistent_batch.block_size + offsets
            self._slots[group][:size].copy_(slots)
        batch.tokens.copy_(persistent_batch.last_tokens[rows])
        batch.context_lens.copy_(batch.positions + 1)

    def _end(self, rows: torch.Tensor, captured: CapturedTokens) -> None:
        """Store the tokens for the next step and for the host, and advance the positions."""
        persistent_batch, table, size = self._persistent_batch, self._sampler.table, len(rows)
        positions = self._positions[:size]
        if self._fused:
            from engine.ops.sampling.decode_step import end_decode

            end_decode(
                rows,
                positions,
                persistent_batch.last_tokens,
                table.num_outputs,
                captured.tokens,
                captured.max_logits,
                num_replays=self._num_replays,
                host_tokens=self._host_tokens,
                host_max_logits=self._host_max_logits,
                padding_row=persistent_batch.padding_row,
                advance=not captured.table_advanced,
            )
            return
        self._sampled[:size].copy_(captured.tokens)
        self._max_logits[:size].copy_(captured.max_logits)
        persistent_batch.set_last_tokens(rows, captured.tokens)
        positions.add_(rows != persistent_batch.padding_row)
        if not captured.table_advanced:
            table.advance(rows)
