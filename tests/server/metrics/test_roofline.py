from __future__ import annotations

from typing import Any

from engine.core.profiling import Peaks, StepWork
from engine.core.types import EngineStats
from engine.server.metrics.reports import EngineReport
from engine.server.metrics.roofline import ROOFLINE_METRICS

WORK = StepWork(
    kind="decode",
    steps=3,
    seconds=0.5,
    floor_seconds=0.25,
    flops=7e9,
    weight_bytes=100.0,
    kv_read=20.0,
    kv_written=3.0,
)


class Report:
    """The part of a ReplicaReport that is read."""

    def __init__(self, stats: EngineStats) -> None:
        self.engine = EngineReport(up=True, stats=stats)


def samples(stats: EngineStats) -> dict[tuple[str, ...], Any]:
    report: Any = Report(stats)
    return {(metric.name, *labels): value for metric in ROOFLINE_METRICS for labels, value in metric.read(report)}


def test_the_work_of_steps_is_exported_by_kind() -> None:
    assert samples(EngineStats(work=(WORK,), peaks=Peaks(bandwidth=4.8e12, flops=989e12))) == {
        ("steps_by_kind", "decode"): 3,
        ("step_seconds", "decode"): 0.5,
        ("step_floor_seconds", "decode"): 0.25,
        ("model_flops", "decode"): 7e9,
        ("model_bytes", "decode", "weights"): 100,
        ("model_bytes", "decode", "kv_read"): 20,
        ("model_bytes", "decode", "kv_written"): 3,
        ("peak_bytes_per_second",): 4.8e12,
        ("peak_flops_per_second",): 989e12,
    }


def test_on_an_unknown_device_floors_and_peaks_are_absent() -> None:
    names = {name for name, *_ in samples(EngineStats(work=(StepWork(kind="prefill", steps=1),)))}
    assert names == {"steps_by_kind", "step_seconds", "model_flops", "model_bytes"}
    assert samples(EngineStats()) == {}
