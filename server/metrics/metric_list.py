"""The metrics of each replica: docs/metrics.md is generated from this list, and /metrics writes what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.core.gc_pauses import GC_BOUNDS
from engine.core.histogram import PREEMPTIONS_BOUNDS, STEP_TOKENS_BOUNDS
from engine.core.types import HistogramCounts
from engine.server.metrics import buckets
from engine.server.metrics.cache_metrics import CACHE_METRICS
from engine.server.metrics.definition import Kind, Metric, Sample, VllmName, by_label
from engine.server.metrics.gc_metrics import pause_samples
from engine.server.metrics.reports import EngineReport, ReplicaReport
from engine.server.metrics.roofline import ROOFLINE_METRICS
from engine.server.metrics.speculation_metrics import SPECULATION_METRICS
from engine.server.metrics.vllm_metrics import VLLM_METRICS
from engine.server.shared.request_metrics import HISTOGRAMS


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


def _waiting(report: ReplicaReport) -> list[Sample]:
    stats = report.engine.stats
    return [(("capacity",), stats.waiting), (("deferred",), stats.compiling)]


def _cache_config(report: ReplicaReport) -> list[Sample]:
    cache = report.engine.cache
    if cache is None:
        return []
    kind, reuses = cache.kv_dtype or cache.dtype, report.engine.prefix_caching and not cache.states
    return [((str(cache.block_size), str(cache.num_blocks), kind, str(reuses)), 1)]


def _graph_replays(report: ReplicaReport) -> Iterator[Sample]:
    for kind, size, steps, _ in report.engine.stats.graph_replays:
        yield (kind, str(size)), steps


def _graph_padding(report: ReplicaReport) -> list[Sample]:
    padding: dict[str, int] = {}
    for kind, _, _, wasted in report.engine.stats.graph_replays:
        padding[kind] = padding.get(kind, 0) + wasted
    return by_label(padding.items())


def _graph_misses(report: ReplicaReport) -> list[Sample]:
    misses = report.engine.stats.graph_misses
    return [] if misses is None else [((), misses)]


def _engine_pauses(report: ReplicaReport) -> Iterator[Sample]:
    for process, counts in report.engine.stats.gc_pauses:
        yield from pause_samples(counts, process)


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
        read=lambda report: by_label(report.engine.startup),
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
        lambda engine: engine.stats.waiting + engine.stats.compiling,
        vllm=VllmName(name="num_requests_waiting"),
    ),
    Metric(
        name="num_requests_waiting_by_reason",
        kind="gauge",
        help="Requests not yet scheduled. capacity: waiting for room in the batch or in the KV cache; deferred: waiting"
        " for a grammar to be compiled.",
        labels=("reason",),
        read=_waiting,
        vllm=VllmName(name="num_requests_waiting_by_reason"),
    ),
    Metric(
        name="requests_finished",
        kind="counter",
        help="Ended requests by finish reason.",
        labels=("finish_reason",),
        read=lambda report: by_label(report.requests.finished.items()),
        vllm=VllmName(name="request_success", labels={"finish_reason": "finished_reason"}),
    ),
    _of_requests("time_to_first_token_seconds", "From arrival to the first token.", buckets.VLLM_FIRST_TOKEN_SECONDS),
    _of_requests("inter_token_latency_seconds", "Between tokens of one request.", buckets.VLLM_TOKEN_SECONDS),
    _of_requests("e2e_request_latency_seconds", "From arrival to finish.", buckets.VLLM_REQUEST_SECONDS),
    _of_requests(
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of one request; of requests with two tokens or more.",
        buckets.VLLM_TOKEN_SECONDS,
    ),
    _of_requests("request_queue_time_seconds", "From arrival to the first step.", buckets.VLLM_REQUEST_SECONDS),
    _of_requests(
        "request_prefill_time_seconds", "From the first step to the first token.", buckets.VLLM_REQUEST_SECONDS
    ),
    _of_requests("request_decode_time_seconds", "From the first token to the last one.", buckets.VLLM_REQUEST_SECONDS),
    _of_requests(
        "request_inference_time_seconds", "From the first step to the last token.", buckets.VLLM_REQUEST_SECONDS
    ),
    _of_requests("request_prompt_tokens", "Tokens of the prompt.", up_to_context=True),
    _of_requests(
        "request_prefill_kv_computed_tokens",
        "Tokens of the prompt that were not in the prefix cache.",
        up_to_context=True,
    ),
    _of_requests("request_generation_tokens", "Tokens generated.", up_to_context=True),
    _of_requests(
        "request_max_num_generation_tokens",
        "Tokens of the longest choice of a prompt, counted when all its choices have finished.",
        up_to_context=True,
    ),
    _of_requests(
        "request_params_max_tokens",
        "max_tokens of the request; if it gives none, what its prompt leaves of the context.",
        up_to_context=True,
    ),
    _of_requests("request_params_n", "Choices of a prompt, counted when all have finished.", buckets.VLLM_NUM_CHOICES),
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
        "Prompt tokens computed, counted per step; those computed again after a preemption count again.",
        lambda engine: engine.stats.prompt_tokens,
    ),
    Metric(
        name="prompt_tokens_by_source",
        kind="counter",
        help="Prompt tokens of requests, counted with their first tokens: computed, or cached in the prefix cache.",
        labels=("source",),
        read=lambda report: by_label(report.requests.prompt_tokens.items()),
        vllm=VllmName(
            name="prompt_tokens_by_source",
            values={"computed": "local_compute", "cached": "local_cache_hit"},
            zeros=("external_kv_transfer",),
        ),
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
        "Share of KV blocks in use, 0 to 1; 0 for a model whose layers all keep a state.",
        lambda engine: engine.stats.blocks_used / max(1, engine.stats.blocks_total),
        vllm=VllmName(name="kv_cache_usage_perc"),
    ),
    Metric(name="kv_blocks", kind="gauge", help="KV blocks by state.", labels=("state",), read=_blocks),
    Metric(
        name="kv_blocks_by_kind",
        kind="gauge",
        help="KV blocks held by each kind of layers, by state; only for models with several kinds.",
        labels=("kind", "state"),
        read=_blocks_by_kind,
    ),
    Metric(
        name="cache_config_info",
        kind="gauge",
        help="1; the labels are the configuration of the KV cache.",
        labels=("block_size", "num_blocks", "cache_dtype", "prefix_caching"),
        read=_cache_config,
        vllm=VllmName(
            name="cache_config_info",
            labels={"num_blocks": "num_gpu_blocks", "prefix_caching": "enable_prefix_caching"},
        ),
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
    *CACHE_METRICS,
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
        read=lambda report: by_label(report.engine.stats.seconds),
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
    Metric(
        name="graph_replays",
        kind="counter",
        help="Steps that ran in CUDA graphs, by kind (decode, verify, prefill) and by size of the graph: sequences for "
        "decode, tokens for verify and prefill.",
        labels=("kind", "size"),
        read=_graph_replays,
    ),
    Metric(
        name="graph_padding",
        kind="counter",
        help="Padding that CUDA graphs computed, by kind: sequences for decode, tokens for verify and prefill.",
        labels=("kind",),
        read=_graph_padding,
    ),
    Metric(
        name="graph_misses",
        kind="counter",
        help="Steps that ran without a CUDA graph although the engine has graphs.",
        read=_graph_misses,
    ),
    _of_engine(
        "counter",
        "policy_faults",
        "Decisions made first come, first served because the scheduling policy failed.",
        lambda engine: engine.stats.policy_faults,
    ),
    *SPECULATION_METRICS,
    *ROOFLINE_METRICS,
    *VLLM_METRICS,
)
"""Metrics of each replica, with the labels model_name and replica."""
