"""All metrics: docs/metrics.md is generated from this list, and /metrics writes what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from engine.core.gc_pauses import GC_BOUNDS, PauseCounts
from engine.core.histogram import PREEMPTIONS_BOUNDS, STEP_TOKENS_BOUNDS
from engine.core.types import HistogramCounts
from engine.server.metrics import buckets
from engine.server.metrics.definition import Kind, Metric, Sample, VllmName
from engine.server.metrics.replica_report import EngineReport, ReplicaReport
from engine.server.shared.metrics_table import FRONT_END_PHASES, HISTOGRAMS, FrontEndMetrics


def _of_engine(
    kind: Kind,
    name: str,
    help_text: str,
    value: Callable[[EngineReport], float | HistogramCounts],
    *,
    vllm: VllmName | None = None,
    bounds: tuple[float, ...] = (),
) -> Metric[ReplicaReport]:
    """A metric of one number, or of one histogram, that the engine process reports."""
    return Metric(
        name=name,
        kind=kind,
        help=help_text,
        read=lambda report: [((), value(report.engine))],
        vllm=vllm,
        bounds=bounds,
    )


def _of_requests(
    name: str, help_text: str, vllm_bounds: tuple[float, ...] = (), *, up_to_context: bool = False
) -> Metric[ReplicaReport]:
    """A histogram that front ends keep, which vLLM has under the same name."""
    return Metric(
        name=name,
        kind="histogram",
        help=help_text,
        read=lambda report: [((), report.requests.histograms[name].snapshot())],
        bounds=HISTOGRAMS[name],
        up_to_context=up_to_context,
        vllm=VllmName(name=name, bounds=vllm_bounds),
    )


def _blocks(report: ReplicaReport) -> list[Sample]:
    stats = report.engine.stats
    free = stats.blocks_total - stats.blocks_used - stats.blocks_cached
    return [(("used",), stats.blocks_used), (("cached",), stats.blocks_cached), (("free",), free)]


def _blocks_by_kind(report: ReplicaReport) -> Iterator[Sample]:
    for kind, used, cached in report.engine.stats.blocks_by_kind:
        yield (kind, "used"), used
        yield (kind, "cached"), cached


def _by_label(pairs: Iterable[tuple[str, float]]) -> list[Sample]:
    return [((label,), value) for label, value in pairs]


def _pauses(counts: PauseCounts, *labels: str) -> Iterator[Sample]:
    """Histograms of garbage collections by generation."""
    for generation, cells in enumerate(counts):
        yield (*labels, str(generation)), HistogramCounts(tuple(map(int, cells[:-1])), cells[-1])


def _engine_pauses(report: ReplicaReport) -> Iterator[Sample]:
    for process, counts in report.engine.stats.gc_pauses:
        yield from _pauses(counts, process)


def _front_end_seconds(server: FrontEndMetrics) -> list[Sample]:
    measured = any(server.phase_cells)
    return _by_label(zip(FRONT_END_PHASES, server.phase_cells, strict=True)) if measured else []


REPLICA_METRICS: tuple[Metric[ReplicaReport], ...] = (
    _of_engine("gauge", "up", "1 while the engine process accepts requests.", lambda engine: engine.up),
    _of_engine(
        "counter",
        "restarts",
        "Restarts of the engine process; after one, the engine's own numbers begin at 0.",
        lambda engine: engine.restarts,
    ),
    Metric(
        name="startup_seconds",
        kind="gauge",
        help="Seconds spent in each phase of the start.",
        labels=("phase",),
        read=lambda report: _by_label(report.engine.startup),
    ),
    _of_engine(
        "gauge",
        "num_requests_running",
        "Sequences in the batch.",
        lambda engine: engine.stats.running,
        vllm=VllmName(name="num_requests_running"),
    ),
    _of_engine(
        "gauge",
        "num_requests_waiting",
        "Requests not yet scheduled.",
        lambda engine: engine.stats.waiting,
        vllm=VllmName(name="num_requests_waiting"),
    ),
    Metric(
        name="requests_finished",
        kind="counter",
        help="Ended requests by finish reason.",
        labels=("finish_reason",),
        read=lambda report: _by_label(report.requests.finished.items()),
        vllm=VllmName(name="request_success", labels={"finish_reason": "finished_reason"}),
    ),
    _of_requests("time_to_first_token_seconds", "From arrival to the first token.", buckets.VLLM_FIRST_TOKEN_SECONDS),
    _of_requests("inter_token_latency_seconds", "Between tokens of one request.", buckets.VLLM_TOKEN_SECONDS),
    _of_requests("e2e_request_latency_seconds", "From arrival to finish.", buckets.VLLM_REQUEST_SECONDS),
    _of_requests("request_queue_time_seconds", "From arrival to the first step.", buckets.VLLM_REQUEST_SECONDS),
    _of_engine(
        "histogram",
        "request_num_preemptions",
        "Preemptions of each request that has ended.",
        lambda engine: engine.stats.request_preemptions,
        bounds=PREEMPTIONS_BOUNDS,
        vllm=VllmName(name="request_num_preemptions", bounds=buckets.VLLM_PREEMPTIONS),
    ),
    _of_engine(
        "counter",
        "prompt_tokens",
        "Prompt tokens computed, again after a preemption.",
        lambda engine: engine.stats.prompt_tokens,
    ),
    _of_engine(
        "counter",
        "generation_tokens",
        "Tokens generated.",
        lambda engine: engine.stats.generation_tokens,
        vllm=VllmName(name="generation_tokens"),
    ),
    _of_engine(
        "gauge",
        "kv_cache_usage_perc",
        "Share of KV blocks in use, 0 to 1.",
        lambda engine: engine.stats.blocks_used / max(1, engine.stats.blocks_total),
        vllm=VllmName(name="kv_cache_usage_perc"),
    ),
    Metric(name="kv_blocks", kind="gauge", help="KV blocks by state.", labels=("state",), read=_blocks),
    Metric(
        name="kv_blocks_by_kind",
        kind="gauge",
        help="KV blocks held by each kind of layers, by state; of models of several kinds.",
        labels=("kind", "state"),
        read=_blocks_by_kind,
    ),
    _of_engine(
        "counter",
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda engine: engine.stats.prefix_queries,
        vllm=VllmName(name="prefix_cache_queries"),
    ),
    _of_engine(
        "counter",
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda engine: engine.stats.prefix_hits,
        vllm=VllmName(name="prefix_cache_hits"),
    ),
    _of_engine(
        "counter",
        "num_preemptions",
        "Sequences preempted to free KV blocks.",
        lambda engine: engine.stats.preemptions,
        vllm=VllmName(name="num_preemptions"),
    ),
    _of_engine("counter", "steps", "Steps run.", lambda engine: engine.stats.steps),
    _of_engine(
        "histogram",
        "iteration_tokens",
        "Tokens computed by each step; each iteration of a multi-step step counts.",
        lambda engine: engine.stats.step_tokens,
        bounds=STEP_TOKENS_BOUNDS,
        vllm=VllmName(name="iteration_tokens_total"),
    ),
    Metric(
        name="phase_seconds",
        kind="counter",
        help="Seconds spent, by phase of a step.",
        labels=("phase",),
        read=lambda report: _by_label(report.engine.stats.seconds),
    ),
    Metric(
        name="gc_seconds",
        kind="histogram",
        help="Pauses of garbage collections in the engine's process and in the worker of rank 0.",
        labels=("process", "generation"),
        bounds=GC_BOUNDS,
        read=_engine_pauses,
    ),
    _of_engine(
        "counter",
        "kernels_compiled",
        "Kernels compiled or loaded while serving, which delays requests.",
        lambda engine: engine.stats.kernels_compiled,
    ),
    _of_engine(
        "counter",
        "graphs_captured",
        "CUDA graphs captured while serving, which delays requests.",
        lambda engine: engine.stats.graphs_captured,
    ),
    _of_engine(
        "counter",
        "policy_faults",
        "Decisions made first come, first served because the scheduling policy failed.",
        lambda engine: engine.stats.policy_faults,
    ),
)
"""Metrics of each replica, with the labels model_name and replica."""

SERVER_METRICS: tuple[Metric[FrontEndMetrics], ...] = (
    Metric(
        name="connections",
        kind="gauge",
        help="Open client connections.",
        read=lambda server: [((), server.connections)],
    ),
    Metric(
        name="connections_dropped",
        kind="counter",
        help="Connections that the server closed early, by reason.",
        labels=("reason",),
        read=lambda server: _by_label(server.dropped.items()),
    ),
    Metric(
        name="front_end_seconds",
        kind="counter",
        help="CPU time of the front ends by phase, with server.phase_times.",
        labels=("phase",),
        read=_front_end_seconds,
    ),
    Metric(
        name="front_end_gc_seconds",
        kind="histogram",
        help="Pauses of garbage collections in the front ends.",
        labels=("generation",),
        bounds=GC_BOUNDS,
        read=lambda server: _pauses(server.gc_pauses.counts()),
    ),
)
"""Metrics of the whole server, with the label model_name."""
