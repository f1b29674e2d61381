"""Times products as a decode step runs them: replayed from a CUDA graph, weights not in cache, each after a norm."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.errors import TritonError

from engine.core.autotune.op import Operands
from engine.core.autotune.task import CandidateError, TuningTask
from engine.core.compilation.recording import CompilingElsewhere
from engine.ops.norm.rms_norm import add_rms_norm

REPLAYS = 5
MAX_CALLS = 32
"""Products in one graph."""
COLD_CACHE_SIZES = 3
"""Weights read by one replay, as a multiple of the L2 cache, where there are enough layers."""


def compile_candidates(wanted: Sequence[tuple[TuningTask, Sequence[Any]]]) -> None:
    """Begin to compile the candidates of tasks, in parallel. Does not wait."""
    with CompilingElsewhere():
        for task, candidates in wanted:
            for candidate in candidates:
                task.op.compile(task.rows, candidate, task.operands[0])


class GraphTimer:
    """The Timer of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Keeps alive the memory pool that all graphs allocate from.
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._first.capture_begin()
            torch.zeros(1, device=device)
            self._first.capture_end()

    def prepare(self, wanted: Sequence[tuple[TuningTask, Sequence[Any]]]) -> None:
        """Begin to compile in other processes. `seconds` waits for a candidate, and fails if its compilation does."""
        compile_candidates(wanted)

    def seconds(self, task: TuningTask, candidate: Any) -> float:
        """Seconds of a product and the norm before it (1 to 2 us): the median of several replays."""
        op, layers = task.op, self._rotation(task.operands)
        source = torch.randn(task.rows, op.inputs, device=self._device).to(op.dtype)
        scale = torch.ones_like(source[0])

        def calls() -> None:
            for layer in layers:
                op.run(candidate, add_rms_norm(source, None, scale, 1e-5)[0], layer)

        try:
            op.run(candidate, source, layers[0])
        except (TritonError, RuntimeError) as error:  # the compiler's passes raise the latter
            raise CandidateError(f"{type(error).__name__}: {error}") from error
        return self.replayed(calls) / len(layers)

    def _rotation(self, layers: Sequence[Operands]) -> Sequence[Operands]:
        """Enough layers that their weights exceed the L2 cache, or all."""
        return layers[: self.cold_layers(layers[0].nbytes)]

    def cold_layers(self, nbytes: int) -> int:
        """Number of layers whose weights, of `nbytes` each, the L2 cache does not hold."""
        return min(max(-(-COLD_CACHE_SIZES * self._cache_bytes // nbytes), 2), MAX_CALLS)

    def replayed(self, calls: Callable[[], None]) -> float:
        """Median seconds of a replay of what `calls` launches."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        times: list[float] = []
        with torch.cuda.stream(self._stream):
            calls()  # the first call may load modules and allocate, which must not be captured
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._first.pool())
            calls()
            graph.capture_end()
            graph.replay()
            for _ in range(REPLAYS):
                begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1000)
            graph.reset()
        return statistics.median(times)
