"""The metrics of speculative decoding at /metrics."""

from __future__ import annotations

from array import array

from prometheus_client.parser import text_string_to_metric_families

from engine.core.types import EngineStats, SpeculationStats
from engine.server.http.prometheus import PrometheusExporter
from engine.server.metrics.reports import EngineReport
from engine.server.shared.metrics_table import FrontEndMetrics, MetricsTable


def exported(stats: SpeculationStats | None, names: str = "engine") -> dict[tuple[str, str], float]:
    """Samples whose names say that they are about drafts, by name and position."""
    table = MetricsTable([memoryview(array("d", [0.0] * FrontEndMetrics.size(1)))])
    report = EngineReport(up=True, stats=EngineStats(speculation=stats))
    exporter = PrometheusExporter(table, lambda: [report], model_name="m", max_len=64, names=names)
    return {
        (sample.name, sample.labels.get("position", "")): sample.value
        for family in text_string_to_metric_families(exporter.text().decode())
        for sample in family.samples
        if "spec" in sample.name
    }


def test_drafts_are_exported_in_all_and_by_position() -> None:
    found = exported(SpeculationStats(verified=(10, 8), accepted=(6, 3), faults=2))
    assert found == {
        ("engine_speculation_proposals_total", ""): 10,
        ("engine_speculation_draft_tokens_total", ""): 18,
        ("engine_speculation_accepted_tokens_total", ""): 9,
        ("engine_speculation_draft_tokens_by_position_total", "0"): 10,
        ("engine_speculation_draft_tokens_by_position_total", "1"): 8,
        ("engine_speculation_accepted_tokens_by_position_total", "0"): 6,
        ("engine_speculation_accepted_tokens_by_position_total", "1"): 3,
        ("engine_speculator_faults_total", ""): 2,
    }


def test_drafts_are_exported_by_the_names_of_vllm() -> None:
    found = exported(SpeculationStats(verified=(10, 8), accepted=(6, 3)), "vllm")
    assert found["vllm:spec_decode_num_drafts_total", ""] == 10
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == 18
    assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == 9
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 3


def test_nothing_is_exported_without_a_speculator() -> None:
    assert exported(None) == {}
