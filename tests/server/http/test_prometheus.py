from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families

from engine.core.histogram import Histogram
from engine.core.types import CacheInfo, EngineStats, HistogramCounts, RequestTimes
from engine.server.http import prometheus
from engine.server.http.prometheus import PrometheusExporter
from engine.server.metrics import buckets
from engine.server.metrics.definition import VLLM_PREFIX, Metric, Sample, VllmName
from engine.server.metrics.metric_list import REPLICA_METRICS
from engine.server.metrics.reports import EngineReport
from engine.server.metrics.server_metrics import HTTP_METRICS, PROCESS_METRICS, SERVER_METRICS
from engine.server.shared.metrics_table import FRONT_END_PHASES, FrontEndMetrics, MetricsTable
from engine.server.shared.request_metrics import FinishedRequest

ALL = (*REPLICA_METRICS, *SERVER_METRICS, *HTTP_METRICS, *PROCESS_METRICS)
MAX_LEN = 2048


def board(rows: int = 1, replicas: int = 1) -> MetricsTable:
    size = FrontEndMetrics.size(replicas)
    return MetricsTable([memoryview(array("d", [0.0] * size)) for _ in range(rows)])


def exporter(board: MetricsTable, *reports: EngineReport, names: str = "engine") -> PrometheusExporter:
    routes = [("other", "other"), ("POST", "/v1/completions"), ("GET", "/v1/models")]
    model = {"model_name": 'a "model"', "max_len": MAX_LEN}
    return PrometheusExporter(board, lambda: reports, **model, names=names, routes=lambda: routes)


def samples(
    board: MetricsTable, stats: EngineStats, *, up: bool = True, names: str = "engine"
) -> dict[tuple[str, str], float]:
    return read(exporter(board, EngineReport(up=up, stats=stats), names=names))


def finished(**fields: Any) -> FinishedRequest:
    usual = {"reason": "stop", "times": None, "seconds": 1.0, "prompt_tokens": 1, "cached_tokens": 0}
    return FinishedRequest(**usual | {"generation_tokens": 1, "max_tokens": 1} | fields)


def read(exporter: PrometheusExporter) -> dict[tuple[str, str], float]:
    """Samples by (name, concatenated values of labels other than those of the model and of replica 0)."""
    text = exporter.text().decode()
    common = {"model_name": 'a "model"', "replica": "0", "engine": "0"}
    return {
        (
            sample.name,
            "".join(value for name, value in sample.labels.items() if common.get(name) != value),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_startup_seconds_are_exported_by_phase() -> None:
    report = EngineReport(up=True, stats=EngineStats(), startup=(("weights", 3.5), ("import", 1.0)))
    found = read(exporter(board(), report))
    assert found["engine_startup_seconds", "weights"] == 3.5
    assert found["engine_startup_seconds", "import"] == 1.0


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


def test_durations_and_finish_reasons_are_exported() -> None:
    numbers = board()
    (metrics,) = numbers.rows[0].replicas
    metrics.observe_tokens(0.3, 1, first=True)
    metrics.observe_tokens(0.04, 4, first=False)
    times = RequestTimes(arrival=1.0, scheduled=1.25, first_token=1.5, finished=2.0)
    metrics.count_prompt(12, cached=8)
    metrics.observe_finish(finished(times=times, prompt_tokens=12, cached_tokens=8, generation_tokens=5, max_tokens=9))
    metrics.observe_prompt(2, 7)
    found = samples(numbers, EngineStats())
    assert found["engine_time_to_first_token_seconds_sum", ""] == 0.3
    assert found["engine_inter_token_latency_seconds_count", ""] == 4
    assert found["engine_inter_token_latency_seconds_bucket", "0.01"] == 4
    assert found["engine_inter_token_latency_seconds_bucket", "0.005"] == 0
    assert found["engine_request_queue_time_seconds_sum", ""] == 0.25
    assert found["engine_requests_finished_total", "stop"] == 1
    assert found["engine_requests_finished_total", "abort"] == 0
    sums = {
        "e2e_request_latency_seconds": 1.0,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 0.5,
        "request_inference_time_seconds": 0.75,
        "request_time_per_output_token_seconds": 0.125,
        "request_prompt_tokens": 12,
        "request_prefill_kv_computed_tokens": 4,
        "request_generation_tokens": 5,
        "request_params_max_tokens": 9,
        "request_params_n": 2,
        "request_max_num_generation_tokens": 7,
    }
    assert {name: found[f"engine_{name}_sum", ""] for name in sums} == sums
    assert found["engine_prompt_tokens_by_source_total", "computed"] == 4
    assert found["engine_prompt_tokens_by_source_total", "cached"] == 8


def test_a_request_of_one_token_has_no_time_per_token_and_one_that_never_ran_only_its_latency() -> None:
    numbers = board()
    (metrics,) = numbers.rows[0].replicas
    times = RequestTimes(arrival=1.0, scheduled=1.0, first_token=2.0, finished=2.0)
    metrics.observe_finish(finished(times=times, generation_tokens=1))
    metrics.observe_finish(finished(reason="error", times=None))
    found = samples(numbers, EngineStats())
    assert found["engine_request_time_per_output_token_seconds_count", ""] == 0
    assert found["engine_request_decode_time_seconds_count", ""] == 1
    assert found["engine_e2e_request_latency_seconds_count", ""] == 2


def test_two_servers_in_one_process_have_separate_metrics() -> None:
    first, second = board(), board()
    first.rows[0].replicas[0].observe_finish(finished(seconds=1.0))
    assert samples(second, EngineStats())["engine_requests_finished_total", "stop"] == 0
    assert samples(first, EngineStats(), up=False)["engine_up", ""] == 0


def test_every_front_end_exports_the_sum_of_all_rows(tmp_path: Path) -> None:
    file = tmp_path / "board"
    made, seen = MetricsTable.map(file, 2, 2, create=True), MetricsTable.map(file, 2, 2)
    ours, theirs = made.rows[0].replicas, seen.rows[1].replicas
    ours[0].observe_finish(finished(seconds=0.5))
    theirs[0].observe_finish(finished(seconds=0.25))
    theirs[1].observe_finish(finished(seconds=0.125))
    theirs[0].observe_tokens(0.25, 1, first=True)
    theirs[0].open_requests = 2
    theirs[1].open_requests = 1
    ours[1].load = 5
    theirs[1].load = 6
    theirs[0].load = 1
    for each in (made, seen):
        found = read(exporter(each, *(EngineReport(up=True, stats=EngineStats()) for _ in range(2))))
        assert found["engine_requests_finished_total", "stop"] == 2
        assert found["engine_requests_finished_total", "1stop"] == 1
        assert found["engine_e2e_request_latency_seconds_sum", ""] == 0.75
        assert found["engine_e2e_request_latency_seconds_sum", "1"] == 0.125
        assert found["engine_time_to_first_token_seconds_count", ""] == 1
        assert each.open_requests == 3
        assert each.loads == [1, 11]


def test_counters_of_an_exited_front_end_remain() -> None:
    numbers = board(2)
    exited, running = (row.replicas[0] for row in numbers.rows)
    exited.observe_finish(finished(seconds=0.5))
    exited.open_requests = 2
    exited.load = 7
    running.load = 3
    numbers.rows[0].abort_open_requests()
    found = samples(numbers, EngineStats())
    assert found["engine_requests_finished_total", "stop"] == 1
    assert found["engine_requests_finished_total", "abort"] == 2
    assert numbers.open_requests == 0
    assert numbers.loads == [3]


def test_all_metrics_have_the_labels_of_model_and_replica() -> None:
    text = exporter(board(), EngineReport(up=True, stats=EngineStats())).text().decode()
    assert 'engine_up{model_name="a \\"model\\"",replica="0"} 1.0\n' in text
    assert 'engine_connections{model_name="a \\"model\\""} 0.0\n' in text


def test_several_replicas_are_labelled() -> None:
    stats = EngineStats(running=2, steps=3, blocks_total=4, blocks_used=1, seconds=(("wait", 1.5),))
    reports = [
        EngineReport(up=True, stats=stats, startup=(("weights", 2.5),)),
        EngineReport(up=False, stats=EngineStats(), restarts=2),
    ]
    found = read(exporter(board(replicas=2), *reports))
    expected = {
        ("engine_up", ""): 1,
        ("engine_up", "1"): 0,
        ("engine_restarts_total", ""): 0,
        ("engine_restarts_total", "1"): 2,
        ("engine_num_requests_running", ""): 2,
        ("engine_num_requests_running", "1"): 0,
        ("engine_kv_cache_usage_perc", ""): 0.25,
        ("engine_kv_blocks", "free"): 3,
        ("engine_kv_blocks", "1free"): 0,
        ("engine_steps_total", ""): 3,
        ("engine_phase_seconds_total", "wait"): 1.5,
        ("engine_startup_seconds", "weights"): 2.5,
        ("engine_requests_finished_total", "stop"): 0,
    }
    assert {key: found[key] for key in expected} == expected


def test_under_vllms_names_a_metric_that_vllm_lacks_keeps_ours() -> None:
    stats = EngineStats(running=2, generation_tokens=5, steps=3)
    ours, theirs, both = (samples(board(), stats, names=names) for names in ("engine", "vllm", "both"))
    assert theirs["vllm:num_requests_running", ""] == 2
    assert theirs["vllm:generation_tokens_total", ""] == 5
    assert theirs["engine_steps_total", ""] == 3
    assert ("engine_num_requests_running", "") not in theirs
    assert both == ours | theirs
    assert not [name for name, _ in ours if name.startswith(VLLM_PREFIX)]


@pytest.mark.parametrize(("names", "count"), [("engine", 0), ("vllm", 1), ("both", 1)])
def test_a_metric_is_read_only_when_it_has_a_name(monkeypatch: pytest.MonkeyPatch, names: str, count: int) -> None:
    reads: list[Any] = []

    def counted(report: Any) -> list[Sample]:
        reads.append(report)
        return [((), 1)]

    metric = Metric(name="", kind="gauge", help="", read=counted, vllm=VllmName(name="theirs"))
    monkeypatch.setattr(prometheus, "REPLICA_METRICS", (metric,))
    samples(board(), EngineStats(), names=names)
    assert len(reads) == count


def test_vllms_histograms_have_vllms_buckets_and_the_same_counts() -> None:
    numbers = board()
    for seconds in (0.0005, 0.02, 0.025, 0.03, 0.3, 9000.0):
        numbers.rows[0].replicas[0].observe_tokens(seconds, 1, first=True)
    found = samples(numbers, EngineStats(), names="both")
    ours, theirs = (
        {
            bound: count
            for (name, bound), count in found.items()
            if name == f"{prefix}time_to_first_token_seconds_bucket"
        }
        for prefix in ("engine_", "vllm:")
    )
    assert [float(bound) for bound in theirs] == [*buckets.VLLM_FIRST_TOKEN_SECONDS, float("inf")]
    assert {bound: ours[bound] for bound in theirs} == theirs
    assert (theirs["0.02"], theirs["0.04"], theirs["2560.0"], theirs["+Inf"]) == (2, 4, 5, 6)


@pytest.mark.parametrize("metric", [one for one in ALL if one.kind == "histogram"], ids=lambda one: one.name)
def test_the_buckets_of_vllm_are_some_of_ours(metric: Any) -> None:
    assert list(metric.bounds) == sorted(set(metric.bounds))
    assert metric.vllm is None or set(metric.vllm.bounds) <= set(metric.bounds)


def test_no_two_metrics_have_one_name() -> None:
    for names in ([one.name for one in ALL if one.name], [one.vllm.name for one in ALL if one.vllm]):
        assert len(names) == len(set(names))


def test_histograms_of_the_engine_are_exported() -> None:
    histogram = Histogram((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0))
    for count in (0, 0, 1, 7):
        histogram.observe(count)
    found = samples(board(), EngineStats(request_preemptions=histogram.snapshot()), names="both")
    assert found["engine_request_num_preemptions_bucket", "0.0"] == 2
    assert found["vllm:request_num_preemptions_bucket", "1.0"] == 3
    assert found["vllm:request_num_preemptions_bucket", "5.0"] == 3
    assert found["vllm:request_num_preemptions_count", ""] == 4
    assert found["vllm:request_num_preemptions_sum", ""] == 8
    assert found["vllm:iteration_tokens_total_count", ""] == 0


def test_bounds_above_the_longest_context_are_left_out() -> None:
    numbers = board()
    times = RequestTimes(arrival=0, scheduled=0, first_token=0, finished=1)
    numbers.rows[0].replicas[0].observe_finish(finished(times=times, prompt_tokens=2047))
    found = samples(numbers, EngineStats(), names="both")
    for prefix in ("engine_", "vllm:"):
        bounds = {bound: n for (name, bound), n in found.items() if name == f"{prefix}request_prompt_tokens_bucket"}
        assert list(bounds)[-3:] == ["1000.0", "2000.0", "+Inf"]
        assert (bounds["2000.0"], bounds["+Inf"]) == (0, 1)


def test_vllms_prompt_tokens_include_those_that_were_cached() -> None:
    numbers = board()
    numbers.rows[0].replicas[0].count_prompt(12, cached=8)
    found = samples(numbers, EngineStats(prompt_tokens=3), names="both")
    assert found["engine_prompt_tokens_total", ""] == 3
    assert found["vllm:prompt_tokens_total", ""] == 12
    assert found["vllm:prompt_tokens_cached_total", ""] == 8
    assert found["vllm:prompt_tokens_by_source_total", "local_compute"] == 4
    assert found["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 8
    assert found["vllm:prompt_tokens_by_source_total", "external_kv_transfer"] == 0
    assert found["vllm:prompt_tokens_cached_by_source_total", "device"] == 8
    for never in ("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits"):
        assert found[f"vllm:{never}_total", ""] == 0


def test_waiting_requests_are_exported_by_reason() -> None:
    found = samples(board(), EngineStats(waiting=3, compiling=2), names="both")
    assert found["engine_num_requests_waiting", ""] == found["vllm:num_requests_waiting", ""] == 5
    assert found["vllm:num_requests_waiting_by_reason", "capacity"] == 3
    assert found["engine_num_requests_waiting_by_reason", "deferred"] == 2


def test_the_kv_cache_is_described_by_labels() -> None:
    sizes = dict.fromkeys(("weights_bytes", "activation_bytes", "kv_bytes", "budget_bytes"), 0)
    cache = CacheInfo(num_blocks=8, block_size=16, device="", dtype="x", **sizes)
    report = EngineReport(up=True, stats=EngineStats(), cache=cache, prefix_caching=True)
    text = exporter(board(), report, names="both").text().decode()
    assert 'replica="0",block_size="16",num_blocks="8",cache_dtype="x",prefix_caching="True"} 1.0' in text
    assert 'engine="0",block_size="16",num_gpu_blocks="8",cache_dtype="x",enable_prefix_caching="True"} 1.0' in text
    report = EngineReport(up=True, stats=EngineStats(), cache=evolve(cache, states=2), prefix_caching=True)
    text = exporter(board(), report).text().decode()
    assert 'prefix_caching="False"} 1.0' in text, "a model with states reuses no prefix"


def test_graphs_are_exported_only_where_there_are_some() -> None:
    assert not [name for name, _ in samples(board(), EngineStats()) if name.startswith("engine_graph_")]
    replays = (("decode", 8, 5, 10), ("decode", 16, 1, 2), ("prefill", 64, 3, 9))
    found = samples(board(), EngineStats(graph_replays=replays, graph_misses=4))
    assert found["engine_graph_replays_total", "decode8"] == 5
    assert found["engine_graph_replays_total", "prefill64"] == 3
    assert found["engine_graph_padding_total", "decode"] == 12
    assert found["engine_graph_misses_total", ""] == 4


@pytest.mark.parametrize("up", [True, False])
def test_vllms_sleep_state_is_awake_while_the_engine_accepts_requests(up: bool) -> None:
    found = samples(board(), EngineStats(), up=up, names="vllm")
    states = {state: value for (name, state), value in found.items() if name == "vllm:engine_sleep_state"}
    assert states == ({"awake": 1, "weights_offloaded": 0, "discard_all": 0} if up else {})


def test_http_requests_are_counted_by_route_and_status() -> None:
    numbers = board(2)
    for row, slot, status, seconds in ((0, 1, 200, 0.25), (1, 1, 499, 0.5), (1, 2, 101, 0.1), (0, 0, 503, 7.0)):
        numbers.rows[row].http.observe(slot, status, seconds)
    found = samples(numbers, EngineStats())
    assert found["http_requests_total", "/v1/completionsPOST2xx"] == 1
    assert found["http_requests_total", "/v1/completionsPOST4xx"] == 1
    assert found["http_requests_total", "/v1/modelsGET2xx"] == 1
    assert found["http_requests_total", "otherother5xx"] == 1
    assert found["http_requests_total", "/v1/modelsGET5xx"] == 0
    assert found["http_request_duration_seconds_sum", "/v1/completionsPOST"] == 0.75


def test_http_requests_of_a_route_that_was_never_asked_are_not_exported() -> None:
    numbers = board()
    numbers.rows[0].http.observe(1, 200, 0.1)
    exported = [labels for name, labels in samples(numbers, EngineStats()) if name == "http_requests_total"]
    assert exported == [f"/v1/completionsPOST{status}" for status in ("2xx", "3xx", "4xx", "5xx")]


def test_declined_requests_are_counted_by_the_code_of_the_error() -> None:
    numbers = board()
    for code in ("overloaded", "overloaded", "shutting_down", "invalid_api_key", None):
        numbers.rows[0].count_rejected(code)
    found = samples(numbers, EngineStats(), names="both")
    assert found["engine_admission_rejections_total", "overloaded"] == 2
    assert found["engine_admission_rejections_total", "shutting_down"] == 1
    assert found["vllm:admission_rejections_total", "max_num_queued_reqs"] == 2
    assert found["vllm:admission_rejections_total", "max_num_queued_tokens"] == 0


def report(stats: EngineStats | None = None) -> EngineReport:
    return EngineReport(up=True, stats=stats or EngineStats())


def test_front_end_seconds_are_exported_by_phase_when_measured() -> None:
    numbers = board(2)
    assert "engine_front_end_seconds" not in exporter(numbers, report()).text().decode()
    for row in numbers.rows:
        row.phase_cells[FRONT_END_PHASES.index("route")] = 1.5
    text = exporter(numbers, report()).text().decode()
    assert re.search(r'engine_front_end_seconds_total{.*phase="route"} 3.0', text)
    assert re.search(r'engine_front_end_seconds_total{.*phase="write"} 0.0', text)


def test_collections_are_exported_by_process_and_generation() -> None:
    numbers = board()
    for phase in ("start", "stop"):
        numbers.rows[0].gc_pauses._on_collection(phase, {"generation": 2})
    counts = (HistogramCounts(), HistogramCounts((0, 0, 2, *[0] * 7), 0.001), HistogramCounts())
    text = exporter(numbers, report(EngineStats(gc_pauses=(("worker", counts),)))).text().decode()
    assert re.search(r'engine_front_end_gc_seconds_count{.*generation="2"} 1.0', text)
    assert re.search(r'engine_gc_seconds_bucket{.*process="worker",generation="1",le="0.001"} 2.0', text)
    assert re.search(r'engine_gc_seconds_bucket{.*process="worker",generation="1",le="0.0003"} 0.0', text)
    assert re.search(r'engine_gc_seconds_sum{.*process="worker",generation="1"} 0.001', text)
