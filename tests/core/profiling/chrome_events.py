"""Events of a Chrome trace as torch.profiler writes them, made by hand."""

from __future__ import annotations

from typing import Any

from engine.core.profiling.layer_events import MODULE, STEP

Event = dict[str, Any]


def span(
    category: str, name: str, begin: float, end: float, *, thread: int = 1, correlation: int | None = None
) -> Event:
    """A span of time of the host."""
    args = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "pid": 7,
        "tid": thread,
        "args": args,
    }


def mark(name: str, begin: float, end: float, *, thread: int = 1) -> Event:
    """An annotation."""
    return span("user_annotation", name, begin, end, thread=thread)


def step(number: int, begin: float, end: float) -> Event:
    return mark(f"{STEP}{number}", begin, end)


def module(name: str, begin: float, end: float) -> Event:
    return mark(MODULE + name, begin, end)


def launch(at: float, correlation: int, name: str = "cudaLaunchKernel", *, thread: int = 1) -> Event:
    """A call of the runtime, 1 us long."""
    return span("cuda_runtime", name, at, at + 1, thread=thread, correlation=correlation)


def kernel(name: str, begin: float, end: float, correlation: int, category: str = "kernel") -> Event:
    """What ran on the device."""
    return span(category, name, begin, end, thread=99, correlation=correlation)
