"""Times multiplications as a decode step runs them: replayed from a CUDA graph, weights cold, behind a small kernel."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from triton.runtime.errors import OutOfResources

from engine.core.kernels.norm import add_rms_norm
from engine.core.kernels.skinny_launch import Tile
from engine.core.layers.skinny import by_torch
from engine.core.layers.tuning import Work

REPLAYS = 5
MOST_CALLS = 16
"""Multiplications in one graph."""
COLD = 3
"""Weights of one replay, in sizes of the L2 cache, where there are enough layers."""


class GraphTimer:
    """A Timer for one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Keeps the memory that all graphs allocate from.
        self._first = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._first.capture_begin()
            torch.zeros(1, device=device)
            self._first.capture_end()

    def prepare(self, wanted: Sequence[tuple[Work, int, Sequence[Tile]]]) -> None:
        """Compile in threads: the compiler proper is not Python."""
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as threads, triton.AsyncCompileMode(threads):
            for work, rows, tiles in wanted:
                weight, bias = work.weights[0]
                x = weight.new_empty(rows, weight.shape[1])
                for tile in tiles:
                    work.few_rows.make(rows, tile).compile(x, weight, bias)

    def seconds(self, work: Work, rows: int, tile: Tile | None) -> float:
        """See Timer. The median of several replays, with the kernel before it, which takes a microsecond or two."""
        problem = work.few_rows.problem
        weights = self._rotation(work)
        source = torch.randn(rows, problem.inputs, device=self._device).to(weights[0][0].dtype)
        scale = torch.ones_like(source[0])
        if tile is None:

            def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
                by_torch(problem, x, weight, bias)
        else:
            launch = work.few_rows.make(rows, tile)

            def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
                if problem.epilogue == "argmax":
                    launch.peaks(x, weight)
                else:
                    launch(x, weight, bias)

        def calls() -> None:
            for weight, bias in weights:
                multiply(add_rms_norm(source, None, scale, 1e-5)[0], weight, bias)

        try:
            return self.replayed(calls) / len(weights)
        except OutOfResources:  # this GPU has less shared memory or fewer registers than the tile wants
            return float("inf")

    def _rotation(self, work: Work) -> Sequence[tuple[torch.Tensor, torch.Tensor | None]]:
        """Layers whose weights together are more than the L2 cache keeps, or all."""
        count = -(-COLD * self._cache_bytes // work.weights[0][0].nbytes)
        return work.weights[: min(max(count, 2), MOST_CALLS)]

    def replayed(self, calls: Callable[[], None]) -> float:
        """Median seconds of a replay of what `calls` launches."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        times: list[float] = []
        with torch.cuda.stream(self._stream):
            calls()  # what is loaded or allocated at the first call must not be captured
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
