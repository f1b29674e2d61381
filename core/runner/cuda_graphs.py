"""Decode steps as CUDA graphs: one a batch size and ending, from the embedding to the sampled token.

A replay reads which sequences it is for, their positions and block tables from fixed tensors, and moves all of these on
by itself. While the same sequences follow each other, the host sends nothing but newly assigned blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from engine.core.attention.base import GraphSlot
from engine.core.attention.batch import ForwardBatch
from engine.core.models.forward_pass import ForwardPass
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.runner.transfer import to_device
from engine.core.sampling.result import SampledTokens
from engine.core.sampling.sampler import DRAW, FULL, GREEDY, Sampler
from engine.core.schedulers.policy import MAX_DECODE_STEPS

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.attention.kv_pool import KVPool
    from engine.core.models.base import Model

T = TypeVar("T")

TURNS = 2 * MAX_DECODE_STEPS
"""Replays whose tokens stand in the host's memory at once: as many as two steps may have."""


def batch_sizes(most: int) -> list[int]:
    """Batch sizes to make graphs for. A batch is padded by less than 8 sequences up to 64, and above by less than a
    quarter of what it has."""
    sizes = [1, 2, 3, 4, 6, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 513, 32)]
    while sizes[-1] < most:
        sizes.append(sizes[-1] * 5 // 4)
    return [size for size in sizes if size < most] + [most]


class Recorder:
    """Records work on a GPU, all in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def record(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Do `work` once, so that all is compiled and allocated, then record it.

        Returns what replays it, and what `work` returned while it was recorded: tensors that each replay fills anew,
        and that a replay of another recording may overwrite.
        """
        (replay,), made = self.record_pieces(lambda cut: work())
        return replay, made

    def record_pieces(self, work: Callable[[Callable[[], None]], T]) -> tuple[list[Callable[[], None]], T]:
        """The same for work that is cut into pieces, to be replayed one by one: each call of the function that it is
        given ends a piece and begins the next."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # torch.cuda.graph would collect garbage and empty the cache of free memory first: 50 ms each.
            graphs[-1].capture_begin(pool=self._memory, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.stream(self._stream):
            work(lambda: None)
            begin()
            try:
                made = work(cut)
            finally:
                graphs[-1].capture_end()
        current.wait_stream(self._stream)
        return [graph.replay for graph in graphs], made


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without owning it, so that what is recorded later may be given it.

    Only for memory that each replay has done with before another begins. (torch's own graph trees make such tensors
    likewise.)
    """
    if tensor.device.type == "cpu":
        return tensor
    owner = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(owner.data_ptr(), tensor.device, owner.nbytes())
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


@define
class _Graph:
    """A recorded step."""

    replay: Callable[[], None]
    logits: torch.Tensor | None
    """[batch, vocabulary], where it ends with logits."""
    run: ForwardPass
    """What it was recorded with, kept as long as it: the plan may own memory that the graph reads."""


class DecodeGraphs:
    """Replays decode steps. Everything a graph touches is given here, and stays where it is in memory."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend[Any, Any],
        pool: KVPool,
        persistent_batch: PersistentBatch,
        sampler: Sampler,
        *,
        max_running: int,
        max_len: int,
        fused: bool,
        recorder: Recorder,
    ) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._persistent_batch = persistent_batch
        self._sampler = sampler
        self._max_len = max_len
        self._fused = fused
        self._sizes = batch_sizes(max_running)
        self._size_of = np.searchsorted(self._sizes, np.arange(max_running + 1))
        device = persistent_batch.tables.device
        self._device = device

        def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(max_running, *shape, dtype=dtype, device=device)

        self._rows, self._positions = tensor(torch.int64), tensor(torch.int64)
        self._tokens, self._slots = tensor(torch.int64), tensor(torch.int64)
        self._sampled, self._peaks = tensor(torch.int64), tensor(torch.float32)
        self._context_lens = tensor(torch.int32)
        self._tables = tensor(torch.int32, persistent_batch.tables.shape[1])
        self._query_starts = torch.arange(max_running + 1, dtype=torch.int32, device=device)
        self._all_rows = torch.arange(max_running, device=device)
        self._rows.fill_(persistent_batch.padding_row)
        pinned = device.type == "cuda"
        self._host_tokens = torch.zeros(TURNS, max_running, dtype=torch.int64, pin_memory=pinned)
        self._host_peaks = torch.zeros(TURNS, max_running, dtype=torch.float32, pin_memory=pinned)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._turns_begun = 0
        self._graphs: dict[tuple[int, str], _Graph] = {}
        self._recorder = recorder
        self._current: tuple[int, ...] = ()
        self._host_rows = np.zeros(0, np.int64)

    def capture_all(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture every batch size with the greedy ending, the largest first, whose memory serves the others.

        on_progress: called with batch sizes done and in all. Other endings are captured when first needed.
        """
        for done, size in enumerate(reversed(self._sizes)):
            on_progress(done, len(self._sizes))
            self._capture(size, GREEDY)

    def leave(self) -> None:
        """Sequences were moved on outside the graphs: send all positions before the next replay."""
        self._current = ()

    def run(self, decodes: tuple[int, ...], iterations: int, lap: Callable[[str], None]) -> list[SampledTokens]:
        """One decode step after the other for these sequences, which `persistent_batch` knows of; one result each.

        lap: called with the name of a phase as it ends.
        """
        size = self._sizes[self._size_of[len(decodes)]]
        ending = self._sampler.kind(decodes)
        if ending == DRAW and not self._fused:
            ending = FULL  # drawing by PyTorch's operations waits for nothing, but allocates by what was asked
        self._sampler.flush()
        graph = self._graphs.get((size, ending))
        if graph is None:
            graph = self._capture(size, ending)
        self._send(decodes, size, iterations)
        lap("prepare")
        samples = []
        for _ in range(iterations):
            graph.replay()
            lap("launch")
            samples.append(self._finish(decodes, graph))
            lap("sample")
        return samples

    def _send(self, decodes: tuple[int, ...], size: int, iterations: int) -> None:
        """Bring blocks, and if others decode than before rows and positions, to the device."""
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

    def _finish(self, decodes: tuple[int, ...], graph: _Graph) -> SampledTokens:
        """The tokens of a replay, on their way to the host."""
        count = len(decodes)
        if graph.logits is None:
            if not self._fused:
                return SampledTokens.from_tokens(self._sampled[:count], self._peaks[:count], decodes)
            line = self._turns_begun % TURNS
            self._turns_begun += 1
            tokens, peaks = self._host_tokens[line, :count], self._host_peaks[line, :count]
            return SampledTokens.from_host(tokens, peaks, decodes, self._device)
        rows = self._rows[:count]
        sampled = self._sampler.sample(graph.logits[:count], decodes, rows)
        self._persistent_batch.keep(rows, sampled.tokens)
        return sampled

    @torch.inference_mode()
    def _capture(self, size: int, ending: str) -> _Graph:
        """Record the step, for padding alone."""
        self.leave()
        self._rows[:size].fill_(self._persistent_batch.padding_row)
        self._positions[:size].zero_()
        batch = self._batch(size)
        plan = self._attention.plan(batch, GraphSlot(num_sequences=size))
        run = ForwardPass(batch=batch, attention=self._attention, plan=plan, pool=self._pool)
        replay, logits = self._recorder.record(lambda: self._step(run, size, ending))
        if logits is not None:
            logits = unowned(logits)
        self._turn.fill_(self._turns_begun)
        self._graphs[size, ending] = made = _Graph(replay, logits, run)
        return made

    def _batch(self, size: int) -> ForwardBatch:
        return ForwardBatch(
            tokens=self._tokens[:size],
            positions=self._positions[:size],
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

    def _step(self, run: ForwardPass, size: int, ending: str) -> torch.Tensor | None:
        """One decode step; what it allocates is the graph's."""
        rows = self._rows[:size]
        self._begin(run.batch, rows)
        hidden = self._model.forward(run)
        if ending == FULL:
            logits = self._model.logits(hidden)
            self._positions[:size].add_(rows != self._persistent_batch.padding_row)
            return logits
        if ending == GREEDY:
            peaks, tokens = self._model.greedy(hidden)
        else:
            tokens, peaks = self._sampler.draw(self._model.logits(hidden), rows)
        self._end(rows, tokens, peaks, advance=ending == GREEDY)
        return None

    def _begin(self, batch: ForwardBatch, rows: torch.Tensor) -> None:
        persistent_batch = self._persistent_batch
        if self._fused:
            from engine.ops.sampling.decode_step import begin_decode

            begin_decode(
                rows,
                batch.positions,
                persistent_batch.last_tokens,
                persistent_batch.tables,
                tokens=batch.tokens,
                slots=batch.slots,
                context_lens=batch.context_lens,
                tables=batch.block_tables,
                block_size=persistent_batch.block_size,
            )
            return
        pages, offsets = batch.positions // persistent_batch.block_size, batch.positions % persistent_batch.block_size
        batch.block_tables.copy_(persistent_batch.tables[rows])
        batch.tokens.copy_(persistent_batch.last_tokens[rows])
        batch.slots.copy_(
            batch.block_tables.gather(1, pages[:, None]).squeeze(1) * persistent_batch.block_size + offsets
        )
        batch.context_lens.copy_(batch.positions + 1)

    def _end(self, rows: torch.Tensor, tokens: torch.Tensor, peaks: torch.Tensor, *, advance: bool) -> None:
        """Keep tokens and go one position further; advance: count the tokens as put out, which drawing does itself."""
        persistent_batch, table, size = self._persistent_batch, self._sampler.table, len(rows)
        positions = self._positions[:size]
        if self._fused:
            from engine.ops.sampling.decode_step import end_decode

            end_decode(
                rows,
                positions,
                persistent_batch.last_tokens,
                table.outputs,
                tokens,
                peaks,
                turn=self._turn,
                host_tokens=self._host_tokens,
                host_peaks=self._host_peaks,
                padding_row=persistent_batch.padding_row,
                advance=advance,
            )
            return
        self._sampled[:size].copy_(tokens)
        self._peaks[:size].copy_(peaks)
        persistent_batch.keep(rows, tokens)
        positions.add_(rows != persistent_batch.padding_row)
        if advance:
            table.advance(rows)
