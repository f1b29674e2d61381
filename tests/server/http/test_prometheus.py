from __future__ import annotations

import re
from array import array
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from engine.core.types import EngineStats, RequestTimes
from engine.server.http.prometheus import EngineReport, PrometheusExporter
from engine.server.shared.metrics_table import FRONT_END_PHASES, FrontEndMetrics, MetricsTable

REPLICAS = 2
ROOT = Path(__file__).parents[3]


def board(rows: int = 1) -> MetricsTable:
    return MetricsTable([memoryview(array("d", [0.0] * (FrontEndMetrics.SIZE + REPLICAS))) for _ in range(rows)])


def samples(board: MetricsTable, stats: EngineStats, up: bool = True) -> dict[tuple[str, str], float]:
    return read(PrometheusExporter(board, lambda: [EngineReport(up=up, stats=stats)]))


def read(exporter: PrometheusExporter) -> dict[tuple[str, str], float]:
    """Samples by (name, concatenated label values)."""
    text = exporter.text().decode()
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_startup_seconds_are_exported_by_phase() -> None:
    report = EngineReport(up=True, stats=EngineStats(), startup=(("weights", 3.5), ("import", 1.0)))
    text = PrometheusExporter(board(), lambda: [report]).text().decode()
    assert 'engine_startup_seconds{phase="weights"} 3.5' in text
    assert 'engine_startup_seconds{phase="import"} 1.0' in text


def test_engine_statistics_are_exported() -> None:
    stats = EngineStats(
        running=2,
        waiting=3,
        blocks_used=25,
        blocks_cached=15,
        blocks_total=100,
        prefix_queries=40,
        prefix_hits=30,
        preemptions=4,
        prompt_tokens=50,
        generation_tokens=60,
        steps=7,
        seconds=(("wait", 1.5),),
        kernels_compiled=8,
        graphs_captured=9,
        policy_faults=10,
    )
    found = samples(board(), stats)
    expected = {
        ("engine_up", ""): 1,
        ("engine_num_requests_running", ""): 2,
        ("engine_num_requests_waiting", ""): 3,
        ("engine_kv_cache_usage_perc", ""): 0.25,
        ("engine_kv_blocks", "used"): 25,
        ("engine_kv_blocks", "cached"): 15,
        ("engine_kv_blocks", "free"): 60,
        ("engine_prefix_cache_queries_total", ""): 40,
        ("engine_prefix_cache_hits_total", ""): 30,
        ("engine_num_preemptions_total", ""): 4,
        ("engine_prompt_tokens_total", ""): 50,
        ("engine_generation_tokens_total", ""): 60,
        ("engine_steps_total", ""): 7,
        ("engine_phase_seconds_total", "wait"): 1.5,
        ("engine_kernels_compiled_total", ""): 8,
        ("engine_graphs_captured_total", ""): 9,
        ("engine_policy_faults_total", ""): 10,
    }
    assert {key: found[key] for key in expected} == expected


def test_front_end_seconds_are_exported_by_phase_when_measured() -> None:
    numbers = board(2)
    assert ("engine_front_end_seconds_total", "http") not in samples(numbers, EngineStats())
    for row in numbers.rows:
        row.phase_cells[FRONT_END_PHASES.index("route")] = 1.5
    found = samples(numbers, EngineStats())
    assert found["engine_front_end_seconds_total", "route"] == 3.0
    assert found["engine_front_end_seconds_total", "write"] == 0.0


def test_collections_are_exported_by_process_and_generation() -> None:
    numbers = board()
    for phase in ("start", "stop"):
        numbers.rows[0].gc_pauses._on_collection(phase, {"generation": 2})
    counts = ((0.0,) * 11, (0.0, 0.0, 2.0, *[0.0] * 7, 0.001), (0.0,) * 11)
    found = samples(numbers, EngineStats(gc_pauses=(("worker", counts),)))
    assert found["engine_gc_seconds_count", "2front_end"] == 1
    assert found["engine_gc_seconds_count", "1worker"] == 2
    assert found["engine_gc_seconds_bucket", "10.001worker"] == 2
    assert found["engine_gc_seconds_bucket", "10.0003worker"] == 0
    assert found["engine_gc_seconds_sum", "1worker"] == 0.001


def test_every_metric_is_documented() -> None:
    names = {name for name, _ in samples(board(), EngineStats())}
    families = {re.sub("_(bucket|count|sum|created)$", "", name) for name in names}
    documented = set(re.findall(r"`(engine_\w+)", (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")))
    assert families <= documented


def test_durations_and_finish_reasons_are_exported() -> None:
    numbers = board()
    (metrics,) = numbers.rows
    metrics.observe_tokens(0.3, 1, first=True)
    metrics.observe_tokens(0.04, 4, first=False)
    times = RequestTimes(arrival=1.0, scheduled=1.25, first_token=1.3, finished=2.0)
    metrics.observe_finish("stop", times, 1.0)
    found = samples(numbers, EngineStats())
    assert found["engine_time_to_first_token_seconds_sum", ""] == 0.3
    assert found["engine_inter_token_latency_seconds_count", ""] == 4
    assert found["engine_inter_token_latency_seconds_bucket", "0.01"] == 4
    assert found["engine_inter_token_latency_seconds_bucket", "0.005"] == 0
    assert found["engine_request_queue_time_seconds_sum", ""] == 0.25
    assert found["engine_e2e_request_latency_seconds_sum", ""] == 1.0
    assert found["engine_requests_finished_total", "stop"] == 1
    assert found["engine_requests_finished_total", "abort"] == 0


def test_two_servers_in_one_process_have_separate_metrics() -> None:
    first, second = board(), board()
    first.rows[0].observe_finish("stop", None, 1.0)
    assert samples(second, EngineStats())["engine_requests_finished_total", "stop"] == 0
    assert samples(first, EngineStats(), up=False)["engine_up", ""] == 0


def test_every_front_end_exports_the_sum_of_all_rows(tmp_path: Path) -> None:
    file = tmp_path / "board"
    made, seen = MetricsTable.map(file, 2, REPLICAS, create=True), MetricsTable.map(file, 2, REPLICAS)
    made.rows[0].observe_finish("stop", None, 0.5)
    seen.rows[1].observe_finish("stop", None, 0.25)
    seen.rows[1].observe_tokens(0.25, 1, first=True)
    seen.rows[1].open_requests = 3
    made.rows[0].loads[1] = 5
    seen.rows[1].loads[1] = 6
    seen.rows[1].loads[0] = 1
    for each in (made, seen):
        found = samples(each, EngineStats())
        assert found["engine_requests_finished_total", "stop"] == 2
        assert found["engine_e2e_request_latency_seconds_sum", ""] == 0.75
        assert found["engine_time_to_first_token_seconds_count", ""] == 1
        assert each.open_requests == 3
        assert each.loads == [1, 11]


def test_counters_of_an_exited_front_end_remain() -> None:
    numbers = board(2)
    numbers.rows[0].observe_finish("stop", None, 0.5)
    numbers.rows[0].open_requests = 2
    numbers.rows[0].loads[0] = 7
    numbers.rows[1].loads[0] = 3
    numbers.rows[0].abort_open_requests()
    found = samples(numbers, EngineStats())
    assert found["engine_requests_finished_total", "stop"] == 1
    assert found["engine_requests_finished_total", "abort"] == 2
    assert numbers.open_requests == 0
    assert numbers.loads == [3, 0]


def test_several_replicas_are_labelled() -> None:
    stats = EngineStats(running=2, steps=3, blocks_total=4, blocks_used=1, seconds=(("wait", 1.5),))
    reports = [
        EngineReport(up=True, stats=stats, startup=(("weights", 2.5),)),
        EngineReport(up=False, stats=EngineStats(), restarts=2),
    ]
    found = read(PrometheusExporter(board(), lambda: reports))
    expected = {
        ("engine_up", "0"): 1,
        ("engine_up", "1"): 0,
        ("engine_restarts_total", "0"): 0,
        ("engine_restarts_total", "1"): 2,
        ("engine_num_requests_running", "0"): 2,
        ("engine_num_requests_running", "1"): 0,
        ("engine_kv_cache_usage_perc", "0"): 0.25,
        ("engine_kv_blocks", "0free"): 3,
        ("engine_kv_blocks", "1free"): 0,
        ("engine_steps_total", "0"): 3,
        ("engine_phase_seconds_total", "wait0"): 1.5,
        ("engine_startup_seconds", "weights0"): 2.5,
        ("engine_requests_finished_total", "stop"): 0,
    }
    assert {key: found[key] for key in expected} == expected
    assert ("engine_up", "") not in found
