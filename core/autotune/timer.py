"""Times multiplications as a decode step runs them: replayed from a CUDA graph, weights cold, behind a small kernel."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from triton.errors import TritonError

from engine.core.autotune.op import Operands
from engine.core.autotune.tuner import CandidateError, TuningTask
from engine.ops.norm.rms_norm import add_rms_norm

REPLAYS = 5
MOST_CALLS = 32
"""Multiplications in one graph."""
MOST_THREADS = 16
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

    def prepare(self, wanted: Sequence[tuple[TuningTask, Sequence[Any]]]) -> None:
        """Compile in threads: the compiler proper is not Python. What fails, fails again where it is launched."""
        with (
            ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as threads,
            triton.AsyncCompileMode(threads, ignore_errors=True),
        ):
            for work, candidates in wanted:
                for candidate in candidates:
                    work.tunable.compile(work.rows, candidate, work.operands[0])

    def seconds(self, work: TuningTask, candidate: Any) -> float:
        """See Timer. The median of several replays, with the kernel before it, which takes a microsecond or two."""
        tunable, layers = work.tunable, self._rotation(work.operands)
        source = torch.randn(work.rows, tunable.inputs, device=self._device).to(tunable.dtype)
        scale = torch.ones_like(source[0])

        def calls() -> None:
            for layer in layers:
                tunable.run(candidate, add_rms_norm(source, None, scale, 1e-5)[0], layer)

        try:
            tunable.run(candidate, source, layers[0])
        except (TritonError, RuntimeError) as error:  # the compiler's passes raise the latter
            raise CandidateError(f"{type(error).__name__}: {error}") from error
        return self.replayed(calls) / len(layers)

    def _rotation(self, layers: Sequence[Operands]) -> Sequence[Operands]:
        """Those whose weights together are more than the L2 cache keeps, or all."""
        count = -(-COLD * self._cache_bytes // layers[0].nbytes)
        return layers[: min(max(count, 2), MOST_CALLS)]

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
