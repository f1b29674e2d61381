"""Metrics of what steps compute and move, next to what their devices could."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.core.profiling import Peaks, StepWork
from engine.core.types import EngineStats

BY_STEP: dict[str, tuple[str, Callable[[StepWork], float | None]]] = {
    "model_steps": ("Steps, by kind: prefill, decode or mixed.", lambda work: work.steps),
    "step_seconds": (
        "Seconds from the submission of a step, or from the result of the step before, to its result.",
        lambda work: work.seconds,
    ),
    "step_floor_seconds": (
        "The least seconds that the steps take at the device's peaks; absent where the peaks are unknown.",
        lambda work: work.floor_seconds,
    ),
    "model_flops": ("FLOPs of matrix products that the steps computed, per device.", lambda work: work.flops),
}
"""Name of a counter -> what it counts, and its value for one kind of steps."""
BYTES: dict[str, Callable[[StepWork], float]] = {
    "weights": lambda work: work.weight_bytes,
    "kv_read": lambda work: work.kv_read,
    "kv_written": lambda work: work.kv_written,
}
PEAKS: dict[str, tuple[str, Callable[[Peaks], float | None]]] = {
    "peak_bytes_per_second": ("Peak memory bandwidth of a device.", lambda peaks: peaks.bandwidth),
    "peak_flops_per_second": (
        "Peak rate of dense matrix products of a device in the model's dtype, FLOPs per second.",
        lambda peaks: peaks.flops,
    ),
    "peak_flops8_per_second": (
        "Peak rate of dense matrix products of 8-bit numbers of a device, FLOPs per second.",
        lambda peaks: peaks.flops8,
    ),
}


def roofline_metrics(stats: Sequence[EngineStats]) -> Iterator[Metric]:
    """The metrics of all replicas, labelled `replica` if there are several; none where no replica counts.

    stats: of each replica, in order.
    """
    several = len(stats) > 1
    replicas = [([str(number)] if several else [], one) for number, one in enumerate(stats) if one.work]
    if not replicas:
        return
    label = ["replica"] if several else []
    for name, (text, value) in BY_STEP.items():
        counter = CounterMetricFamily(f"engine_{name}", text, labels=[*label, "kind"])
        for replica, one in replicas:
            for work in one.work:
                counted = value(work)
                if counted is not None:
                    counter.add_metric([*replica, work.kind], counted)
        yield counter
    text = "Bytes that the steps read and wrote, activations left out, per device."
    moved = CounterMetricFamily("engine_model_bytes", text, labels=[*label, "kind", "what"])
    for replica, one in replicas:
        for work in one.work:
            for what, size in BYTES.items():
                moved.add_metric([*replica, work.kind, what], size(work))
    yield moved
    for name, (text, peak) in PEAKS.items():
        gauge = GaugeMetricFamily(f"engine_{name}", text, labels=label)
        for replica, one in replicas:
            found = None if one.peaks is None else peak(one.peaks)
            if found is not None:
                gauge.add_metric(replica, found)
        yield gauge
