"""EngineStats: the statistics of one engine."""

from __future__ import annotations

from attrs import frozen

from engine.core.profiling.cost import Peaks
from engine.core.profiling.live import StepWork
from engine.core.types.statistics import CacheStats, HistogramCounts, SpeculationStats


@frozen(kw_only=True)
class EngineStats:
    """Counters since the start of one engine, and current gauges."""

    running: int = 0
    waiting: int = 0
    compiling: int = 0
    """Requests that wait until their grammars are compiled; not counted in `waiting`."""
    blocks_used: int = 0
    """KV blocks in the block tables of running requests."""
    blocks_cached: int = 0
    """KV blocks that no request uses, kept in the prefix cache."""
    blocks_total: int = 0
    """All KV blocks, free ones included."""
    blocks_by_kind: tuple[tuple[str, int, int], ...] = ()
    """(BlockKind.name, blocks used, blocks cached) of each kind, if there are several."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found in the prefix cache."""
    preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed."""
    generation_tokens: int = 0
    steps: int = 0
    policy_faults: int = 0
    """Decisions made first come, first served because the scheduling policy failed or gave an invalid answer."""
    seconds: tuple[tuple[str, float], ...] = ()
    """(phase, seconds spent in it): schedule, submit, wait, commit and the runner's own phases."""
    kernels_compiled: int = 0
    """Kernels compiled, or loaded from the kernel cache, by steps: each delays all requests of its step."""
    graphs_captured: int = 0
    """CUDA graphs captured by steps: each delays all requests of its step."""
    cache: CacheStats | None = None
    """What `cache.metrics` measures; None: it is off."""
    speculation: SpeculationStats | None = None
    """What became of drafts; None: there is no speculator."""
    kv_events: tuple[int, int] | None = None
    """(batches of KV cache events, batches dropped of these); None: no events are published."""
    graph_replays: tuple[tuple[str, int, int, int], ...] = ()
    """(kind of step: decode, verify or prefill, size, steps that ran in graphs of this size, sequences or tokens of
    padding in them), ascending; the last two are counters."""
    graph_misses: int | None = None
    """Steps that ran without CUDA graphs although there are some; None: there are none."""
    work: tuple[StepWork, ...] = ()
    """What steps computed and moved on rank 0, by kind of step; (): off or unknown."""
    peaks: Peaks | None = None
    """Peaks of the device of rank 0; None: unknown, or `work` is off."""
    gc_pauses: tuple[tuple[str, tuple[HistogramCounts, ...]], ...] = ()
    """(process, durations of its garbage collections, seconds, by generation): "engine" and, if rank 0 has a process of
    its own, "worker"."""
    step_tokens: HistogramCounts = HistogramCounts()
    """Tokens that each step computed; each iteration of a multi-step step counts. Bounds: STEP_TOKENS_BOUNDS."""
    request_preemptions: HistogramCounts = HistogramCounts()
    """Preemptions of each request that has ended, also of those aborted. Bounds: PREEMPTIONS_BOUNDS."""
