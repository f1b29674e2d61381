"""Metrics of the FLOPs and bytes of steps, and of their devices' peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from engine.core.profiling import Peaks, StepWork
from engine.server.metrics.definition import Metric, Sample
from engine.server.metrics.reports import ReplicaReport


def _by_kind(name: str, help_text: str, value: Callable[[StepWork], float | None]) -> Metric[ReplicaReport]:
    """A counter by kind of step; absent where the value is unknown."""

    def read(report: ReplicaReport) -> Iterator[Sample]:
        for work in report.engine.stats.work:
            counted = value(work)
            if counted is not None:
                yield (work.kind,), counted

    return Metric(name=name, kind="counter", help=help_text, labels=("kind",), read=read)


def _peak(name: str, help_text: str, value: Callable[[Peaks], float | None]) -> Metric[ReplicaReport]:
    """A gauge of the device; absent where the peak is unknown."""

    def read(report: ReplicaReport) -> Iterator[Sample]:
        peaks = report.engine.stats.peaks
        found = None if peaks is None else value(peaks)
        if found is not None:
            yield (), found

    return Metric(name=name, kind="gauge", help=help_text, read=read)


def _bytes(report: ReplicaReport) -> Iterator[Sample]:
    for work in report.engine.stats.work:
        yield (work.kind, "weights"), work.weight_bytes
        yield (work.kind, "kv_read"), work.kv_read
        yield (work.kind, "kv_written"), work.kv_written


ROOFLINE_METRICS: tuple[Metric[ReplicaReport], ...] = (
    _by_kind("steps_by_kind", "Steps run, by kind: prefill, decode or mixed.", lambda work: work.steps),
    _by_kind(
        "step_seconds",
        "Seconds from the submission of each step, or from the previous step's result if that is later, to its result.",
        lambda work: work.seconds,
    ),
    _by_kind(
        "step_floor_seconds",
        "Minimum seconds that the steps would take at the device's peaks; absent where the peaks are unknown.",
        lambda work: work.floor_seconds,
    ),
    _by_kind("model_flops", "FLOPs of matrix products that the steps computed, per device.", lambda work: work.flops),
    Metric(
        name="model_bytes",
        kind="counter",
        help="Bytes of weights, keys, values and states that the steps read and wrote, per device.",
        labels=("kind", "what"),
        read=_bytes,
    ),
    _peak("peak_bytes_per_second", "Peak memory bandwidth of a device.", lambda peaks: peaks.bandwidth),
    _peak(
        "peak_flops_per_second",
        "Peak rate of a device for dense matrix products in the model's dtype, FLOPs per second.",
        lambda peaks: peaks.flops,
    ),
    _peak(
        "peak_flops8_per_second",
        "Peak rate of a device for dense matrix products of 8-bit numbers, FLOPs per second.",
        lambda peaks: peaks.flops8,
    ),
)
"""Metrics of each replica (profiling.md)."""
