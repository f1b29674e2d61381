from __future__ import annotations

from typing import Any

from engine.core.profiling import StepWork
from engine.core.types import EngineStats
from engine.server.metrics.reports import EngineReport
from engine.server.metrics.vllm_metrics import VLLM_METRICS

ESTIMATES = [metric for metric in VLLM_METRICS if metric.vllm is not None and metric.vllm.name.startswith("estimated_")]
DECODE = StepWork(kind="decode", steps=3, flops=7e9, weight_bytes=100.0, kv_read=20.0, kv_written=3.0)
PREFILL = StepWork(kind="prefill", steps=1, flops=1e9, weight_bytes=50.0, kv_read=0.0, kv_written=9.0)


class Report:
    """The part of a ReplicaReport that is read."""

    def __init__(self, stats: EngineStats) -> None:
        self.engine = EngineReport(up=True, stats=stats)


def estimates(stats: EngineStats) -> dict[str, Any]:
    report: Any = Report(stats)
    return {metric.vllm.name: value for metric in ESTIMATES if metric.vllm for _, value in metric.read(report)}


def test_vllms_estimates_are_the_work_of_the_steps_of_all_kinds() -> None:
    assert estimates(EngineStats(work=(DECODE, PREFILL))) == {
        "estimated_flops_per_gpu": 8e9,
        "estimated_read_bytes_per_gpu": 170.0,
        "estimated_write_bytes_per_gpu": 12.0,
    }


def test_vllms_estimates_are_absent_when_work_is_not_counted() -> None:
    assert estimates(EngineStats()) == {}
