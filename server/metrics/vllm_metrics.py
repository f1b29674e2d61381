"""Metrics of vLLM that this engine defines otherwise or never needs, exported because dashboards ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.profiling import StepWork
from engine.server.metrics.definition import Kind, Metric, Sample, VllmName, by_label
from engine.server.metrics.reports import ReplicaReport


def _of_vllm(
    kind: Kind, name: str, help_text: str, read: Callable[[ReplicaReport], Iterable[Sample]], *labels: str
) -> Metric[ReplicaReport]:
    """A metric without a name of ours."""
    return Metric(name="", kind=kind, help=help_text, read=read, labels=labels, vllm=VllmName(name=name))


def _never(name: str, help_text: str) -> Metric[ReplicaReport]:
    """A counter of what never happens here."""
    return _of_vllm("counter", name, help_text, lambda report: [((), 0)])


def _estimate(name: str, help_text: str, value: Callable[[StepWork], float]) -> Metric[ReplicaReport]:
    """A counter over the steps of all kinds; absent where their work is not counted."""

    def read(report: ReplicaReport) -> list[Sample]:
        work = report.engine.stats.work
        return [((), sum(map(value, work)))] if work else []

    return _of_vllm("counter", name, help_text, read)


def _cached(report: ReplicaReport) -> int:
    return report.requests.prompt_tokens["cached"]


def _sleep_states(report: ReplicaReport) -> list[Sample]:
    if not report.engine.up:
        return []
    return by_label((("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)))


def _graph_modes(report: ReplicaReport) -> list[Sample]:
    stats = report.engine.stats
    piecewise = sum(replays for kind, _, replays, _ in stats.graph_replays if kind == "prefill")
    full = sum(replays for kind, _, replays, _ in stats.graph_replays if kind != "prefill")
    without = sum(stats.step_tokens.counts) if stats.graph_misses is None else stats.graph_misses
    return by_label((("FULL", full), ("PIECEWISE", piecewise), ("NONE", without)))


VLLM_METRICS: tuple[Metric[ReplicaReport], ...] = (
    _of_vllm(
        "counter",
        "prompt_tokens",
        "Prompt tokens of requests, counted with their first tokens, cached ones included.",
        lambda report: [((), sum(report.requests.prompt_tokens.values()))],
    ),
    _of_vllm(
        "counter",
        "prompt_tokens_cached",
        "Prompt tokens of requests that were in the prefix cache.",
        lambda report: [((), _cached(report))],
    ),
    _of_vllm(
        "counter",
        "prompt_tokens_cached_by_source",
        "Prompt tokens of requests that were in the prefix cache; device is the only source.",
        lambda report: [(("device",), _cached(report))],
        "source",
    ),
    _never(
        "external_prefix_cache_queries",
        "Prompt tokens looked up in a cache outside the process: 0, since there is none.",
    ),
    _never("external_prefix_cache_hits", "Prompt tokens found in a cache outside the process: 0, since there is none."),
    _never("mm_cache_queries", "Images and sounds looked up in a cache: 0, since inputs are text."),
    _never("mm_cache_hits", "Images and sounds found in a cache: 0, since inputs are text."),
    _of_vllm(
        "gauge",
        "engine_sleep_state",
        "1 for the state awake while the engine process accepts requests, 0 for the others: there is no sleep mode.",
        _sleep_states,
        "sleep_state",
    ),
    _of_vllm(
        "counter",
        "cudagraph_iterations",
        "Steps in a CUDA graph (FULL: decode and verify), in piecewise graphs (PIECEWISE: with prefill) and without"
        " (NONE); each iteration of a multi-step step counts.",
        _graph_modes,
        "runtime_mode",
    ),
    _estimate(
        "estimated_flops_per_gpu",
        "FLOPs of matrix products that the steps computed, per device.",
        lambda work: work.flops,
    ),
    _estimate(
        "estimated_read_bytes_per_gpu",
        "Bytes of weights, keys, values and states that the steps read, per device; without activations.",
        lambda work: work.weight_bytes + work.kv_read,
    ),
    _estimate(
        "estimated_write_bytes_per_gpu",
        "Bytes of keys, values and states that the steps wrote, per device; without activations.",
        lambda work: work.kv_written,
    ),
)
"""Metrics of each replica, exported under vLLM's names alone."""
