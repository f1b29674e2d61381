from __future__ import annotations

from typing import Any

from engine.core.graph_uses import GraphUses
from engine.core.profiling import StepWork
from engine.core.types import DraftSlice, EngineStats, HistogramCounts, Step
from engine.server.metrics.reports import EngineReport
from engine.server.metrics.vllm_metrics import VLLM_METRICS

DECODE = StepWork(kind="decode", steps=3, flops=7e9, weight_bytes=100.0, kv_read=20.0, kv_written=3.0)
PREFILL = StepWork(kind="prefill", steps=1, flops=1e9, weight_bytes=50.0, kv_read=0.0, kv_written=9.0)


class Report:
    """The part of a ReplicaReport that is read."""

    def __init__(self, stats: EngineStats) -> None:
        self.engine = EngineReport(up=True, stats=stats)


def samples(stats: EngineStats, beginning: str) -> dict[tuple[str, ...], Any]:
    """(name, labels) of the metrics whose names begin so -> value."""
    report: Any = Report(stats)
    chosen = [metric for metric in VLLM_METRICS if metric.vllm and metric.vllm.name.startswith(beginning)]
    return {
        (metric.vllm.name, *labels): value for metric in chosen if metric.vllm for labels, value in metric.read(report)
    }


def test_vllms_estimates_are_the_work_of_the_steps_of_all_kinds() -> None:
    assert samples(EngineStats(work=(DECODE, PREFILL)), "estimated_") == {
        ("estimated_flops_per_gpu",): 8e9,
        ("estimated_read_bytes_per_gpu",): 170.0,
        ("estimated_write_bytes_per_gpu",): 12.0,
    }


def test_vllms_estimates_are_absent_when_work_is_not_counted() -> None:
    assert samples(EngineStats(), "estimated_") == {}


def test_vllms_modes_of_cuda_graphs_are_full_for_decode_and_piecewise_for_prefill() -> None:
    replays = (("decode", 8, 5, 10), ("decode", 16, 1, 2), ("prefill", 64, 3, 9))
    assert samples(EngineStats(graph_replays=replays, graph_misses=4), "cudagraph_") == {
        ("cudagraph_iterations", "FULL"): 6,
        ("cudagraph_iterations", "PIECEWISE"): 3,
        ("cudagraph_iterations", "NONE"): 4,
    }


def test_vllms_full_cuda_graphs_include_steps_that_verify_drafts() -> None:
    uses = GraphUses()
    uses.count(Step(id=1, decodes=(0, 1), chunks=()), 2)
    uses.count(Step(id=2, decodes=(), chunks=(), drafts=(DraftSlice(0, 4, (5, 6)),)), 4)
    found = samples(EngineStats(graph_replays=uses.replays(), graph_misses=uses.misses), "cudagraph_")
    assert found["cudagraph_iterations", "FULL"] == 2


def test_all_iterations_are_without_cuda_graphs_where_there_are_none() -> None:
    stats = EngineStats(step_tokens=HistogramCounts((2, 5), 40.0))
    assert samples(stats, "cudagraph_")["cudagraph_iterations", "NONE"] == 7
