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
from engine.core.runner.decode_batch import DecodeBatch
from engine.core.runner.draft_batch import DraftBatch
from engine.core.runner.graph_capture import GraphCapturer, weak_ref_tensor
from engine.core.runner.graph_sizes import ALL_RECORDED, batch_sizes, recorded_sizes
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.transfer import to_device

if TYPE_CHECKING:
    from engine.core.runner.device_state import DeviceState
    from engine.core.runner.lap_timer import LapTimer
    from engine.core.sampling.base import CapturedTokens, PathName, SamplingPath
    from engine.core.sampling.draft_rows import VerifiedDrafts
    from engine.core.types import Step


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
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._fused = fused
        self._sizes = batch_sizes(max_running)
        self._size_of = np.searchsorted(self._sizes, np.arange(max_running + 1))
        self._device = persistent_batch.tables.device
        self._batch = batch = DecodeBatch(
            persistent_batch,
            state.sampler.table,
            num_groups=len(state.groups),
            max_running=max_running,
            max_len=max_len,
            fused=fused,
            windows=windows,
            has_drafts=max_drafts > 0,
        )
        # Bound here, since each step reads them.
        self._rows, self._positions, self._tokens = batch.rows, batch.positions, batch.tokens
        self._tokens_of_replay = batch.tokens_of_replay
        self._draft_batch: DraftBatch | None = None
        if max_drafts:
            self._draft_batch = DraftBatch(
                persistent_batch,
                state.sampler.table,
                rows=batch.rows,
                positions=batch.positions,
                max_drafts=max_drafts,
                fused=fused,
            )
        self._graphs: dict[tuple[int, PathName], _Graph] = {}
        self._capturer = capturer
        self._current: tuple[int, ...] = ()
        self._host_rows = np.zeros(0, np.int64)

    @torch.inference_mode()
    def run_without_graphs(self) -> None:
        """Launch the kernels of the captures once, one by one, for padding rows, in the order of `capture_all`."""
        first, *others = self._sampler.graph_paths
        for size in reversed(recorded_sizes(self._sizes, ALL_RECORDED)):
            self._pad(size)
            run = self._state.forward_pass(self.batch(size), GraphSlot(num_sequences=size))
            self._step(run, size, first)
            for path in others:
                captured = self._sample_alone(size, path)
                if not isinstance(captured, torch.Tensor):
                    self._batch.end(size, captured)

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
        count = step.decode_rows
        size, path = self.size(count), sampler.graph_path((*step.decodes, *[part.sequence for part in step.drafts]))
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
            sequences = (*step.decodes, *step.draft_sequences)
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
        self._batch.undo_count()

    def _pad(self, size: int) -> None:
        """Fill a batch with padding rows."""
        self.invalidate()
        self._batch.pad(size)

    @torch.inference_mode()
    def _capture(self, size: int, paths: Sequence[SamplingPath]) -> list[_Graph]:
        """Capture the decode steps of a batch of padding rows, one for each sampling path."""
        self._pad(size)
        run = self._state.forward_pass(self.batch(size), GraphSlot(num_sequences=size))
        endings = [partial(self._finish, size, path) for path in paths]

        def begin() -> torch.Tensor:
            return self._forward(run, size)

        def warm_up() -> None:
            hidden = begin()
            for ending in endings:
                ending(hidden)

        captured = self._capturer.capture_alike(begin, endings, warm_up)
        self._batch.undo_count()
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
        return self._batch.forward_batch(size)

    def _step(self, run: ForwardPass, size: int, path: SamplingPath) -> torch.Tensor | None:
        """Run one decode step; returns the logits where the sampling path cannot finish inside the graph."""
        return self._finish(size, path, self._forward(run, size))

    def _forward(self, run: ForwardPass, size: int) -> torch.Tensor:
        """The part of a decode step that all sampling paths share; returns the hidden states."""
        self._batch.begin(run.batch, size)
        return self._model.forward(run)

    def _finish(self, size: int, path: SamplingPath, hidden: torch.Tensor) -> torch.Tensor | None:
        """The rest of a decode step, after `_forward`, for a sampling path; returns what `_step` does."""
        captured = path.capture(self._model, hidden, self._rows[:size])
        if isinstance(captured, torch.Tensor):
            self._batch.advance(size)
            return captured
        self._batch.end(size, captured)
        return None
