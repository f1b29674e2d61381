from __future__ import annotations

from engine.core.profiling import Peaks, StepWork
from engine.core.types import EngineStats
from engine.server.http.roofline_metrics import roofline_metrics

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


def samples(*stats: EngineStats) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in roofline_metrics(stats)
        for sample in family.samples
    }


def test_the_work_of_steps_is_exported_by_kind() -> None:
    found = samples(EngineStats(work=(WORK,), peaks=Peaks(bandwidth=4.8e12, flops=989e12)))
    assert found == {
        ("engine_model_steps_total", "decode"): 3,
        ("engine_step_seconds_total", "decode"): 0.5,
        ("engine_step_floor_seconds_total", "decode"): 0.25,
        ("engine_model_flops_total", "decode"): 7e9,
        ("engine_model_bytes_total", "decode", "weights"): 100,
        ("engine_model_bytes_total", "decode", "kv_read"): 20,
        ("engine_model_bytes_total", "decode", "kv_written"): 3,
        ("engine_peak_bytes_per_second",): 4.8e12,
        ("engine_peak_flops_per_second",): 989e12,
    }


def test_on_an_unknown_device_floors_and_peaks_are_absent() -> None:
    names = {name for name, *_ in samples(EngineStats(work=(StepWork(kind="prefill", steps=1),)))}
    assert names == {
        "engine_model_steps_total",
        "engine_step_seconds_total",
        "engine_model_flops_total",
        "engine_model_bytes_total",
    }
    assert samples(EngineStats()) == {}


def test_replicas_have_a_label() -> None:
    found = samples(EngineStats(), EngineStats(work=(WORK,)))
    assert found["engine_model_steps_total", "1", "decode"] == 3
