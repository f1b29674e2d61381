"""Timers of shape_sweep.py, and compilation in threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from triton.errors import TritonError

from engine.core.autotune import GraphTimer, TuningTask
from engine.core.host import Host

MIN_CALLS = 16
"""Calls per replay, at least: the start and end of a replay then add little."""
MAX_THREADS = 16

Call = Callable[[], object]


class SweepTimer(Protocol):
    """Measures candidates for the tuner, and sequences of calls."""

    def prepare(self, wanted: Sequence[tuple[TuningTask, Sequence[Any]]]) -> None:
        """As GraphTimer.prepare."""

    def seconds(self, task: TuningTask, candidate: Any) -> float:
        """As GraphTimer.seconds."""

    def per_call(self, calls: Sequence[Call]) -> float:
        """Mean seconds of a call, if all follow one another."""

    def replayed(self, calls: Call) -> float:
        """Seconds of a replay of what `calls` launches."""


class GpuTimer(GraphTimer):
    """Times replays of CUDA graphs."""

    def per_call(self, calls: Sequence[Call]) -> float:
        """Mean seconds of a call in a graph of all of them, again and again up to MIN_CALLS."""
        turns = -(-MIN_CALLS // len(calls))

        def all_calls() -> None:
            for _ in range(turns):
                for call in calls:
                    call()

        return self.replayed(all_calls) / turns / len(calls)


class ClockTimer:
    """Times single calls by the clock: for tests on a CPU, where the interpreter runs the kernels."""

    def prepare(self, wanted: Sequence[tuple[TuningTask, Sequence[Any]]]) -> None:
        """Nothing is compiled."""

    def seconds(self, task: TuningTask, candidate: Any) -> float:
        """Seconds of one product."""
        x = torch.randn(task.rows, task.op.inputs).to(task.op.dtype)
        return self.per_call([lambda: task.op.run(candidate, x, task.operands[0])])

    def per_call(self, calls: Sequence[Call]) -> float:
        """Seconds of the first call."""
        return self.replayed(calls[0])

    def replayed(self, calls: Call) -> float:
        """Seconds of one call."""
        begin = time.perf_counter()
        calls()
        return time.perf_counter() - begin


def make_timer(device: torch.device) -> SweepTimer:
    """The timer of a device."""
    return GpuTimer(device) if device.type == "cuda" else ClockTimer()


def run_in_threads(calls: Sequence[Call]) -> None:
    """Make each call once, so that the kernels it launches are compiled. Those that fail are left to fail again."""
    if torch.cuda.is_available():
        count = min(Host().cores(), MAX_THREADS)
        with ThreadPoolExecutor(
            count, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
        ) as threads:
            list(threads.map(runs, calls))
        torch.cuda.synchronize()


def runs(call: Call) -> bool:
    """Make a call. Returns whether its kernels compile and fit the GPU."""
    try:
        with torch.inference_mode():
            call()
    except (TritonError, RuntimeError) as error:  # the compiler's passes raise the latter
        print(f"    left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        return False
    return True
