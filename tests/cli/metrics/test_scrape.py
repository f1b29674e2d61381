"""Samples of /metrics, and their growth where processes are restarted and front ends answer in turn."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.cli.errors import ServerError
from engine.cli.metrics.scrape import Interval, Scrape
from engine.core.types import EngineStats, HistogramCounts
from engine.server.http.prometheus import PrometheusExporter
from engine.server.metrics.reports import EngineReport
from engine.server.shared.metrics_table import FrontEndMetrics, MetricsTable


def interval(before: str, after: str, seconds: float = 2.0) -> Interval:
    return Interval(Scrape.of(before, {}, 10.0), Scrape.of(after, {}, 10.0 + seconds))


def replica(steps: float, restarts: int = 0, number: int = 0) -> str:
    labels = f'{{model_name="m",replica="{number}"}}'
    return f"engine_restarts_total{labels} {restarts}.0\nengine_steps_total{labels} {steps}\n"


def process(role: str, cpu: float, started: float) -> str:
    labels = f'{{process="{role}",number="0"}}'
    return f"process_cpu_seconds_total{labels} {cpu}\nprocess_start_time_seconds{labels} {started}\n"


def test_a_scrape_has_the_samples_that_prometheus_clients_parser_finds() -> None:
    table = MetricsTable([memoryview(bytearray(8 * FrontEndMetrics.size(2))).cast("d")])
    table.rows[0].replicas[1].observe_tokens(0.02, 1, first=True)
    stats = EngineStats(steps=3, seconds=(("submit", 0.5),), step_tokens=HistogramCounts((1,) * 14, 1.5e9))
    reports = [EngineReport(up=True, stats=stats), EngineReport(up=False, stats=EngineStats())]
    text = PrometheusExporter(table, lambda: reports, model_name='a "model"\\of\nmine', max_len=100).text().decode()
    expected = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    found = Scrape.of(text, {}, 0.0)
    assert {(name, labels): value for name, of in found.samples.items() for labels, value in of.items()} == expected
    assert len(expected) > 500


@pytest.mark.parametrize("text", ["<html>", "engine_up{} x y z"])
def test_a_scrape_of_other_text_is_an_error(text: str) -> None:
    with pytest.raises(ServerError, match="not Prometheus' text format"):
        Scrape.of(text, {}, 0.0)


def test_growth_is_summed_over_the_samples_with_these_labels() -> None:
    between = interval('a{x="1",y="1"} 1\na{x="1",y="2"} 2\n', 'a{x="1",y="1"} 2\na{x="1",y="2"} 5\na{x="2",y="1"} 9\n')
    assert between.total("a") == 13
    assert between.total("a", x="1") == 4
    assert between.by("a", "y") == {"1": 10, "2": 3}
    assert between.by("a", "y", x="2") == {"1": 9}
    assert between.total("absent") == 0


def test_a_counter_has_not_grown_when_another_front_end_answers_with_an_older_report() -> None:
    assert interval(replica(100), replica(98)).total("engine_steps_total") == 0


def test_a_counter_begins_at_zero_when_its_engine_process_was_restarted() -> None:
    between = interval(replica(100) + replica(50, number=1), replica(7, restarts=1) + replica(40, number=1))
    assert between.restarted_replicas == ["0"]
    assert between.by("engine_steps_total", "replica") == {"0": 7, "1": 0}


def test_nothing_has_grown_when_an_engine_process_is_down_and_all_when_it_is_up_again() -> None:
    down = replica(0, restarts=1)
    assert interval(replica(100), down).total("engine_steps_total") == 0
    assert interval(down, replica(7, restarts=1)).total("engine_steps_total") == 7


def test_a_process_is_replaced_when_its_start_time_moves_by_more_than_the_clock() -> None:
    moved = interval(process("front_end", 9.0, 100.0), process("front_end", 2.0, 160.0))
    assert moved.replaced_processes == [("front_end", "0")]
    assert moved.total("process_cpu_seconds_total") == 2.0
    adjusted = interval(process("front_end", 9.0, 100.0), process("front_end", 9.5, 100.6))
    assert not adjusted.replaced_processes
    assert adjusted.total("process_cpu_seconds_total") == 0.5


def test_another_server_answers_when_the_supervisor_is_new_or_fewer_requests_have_finished() -> None:
    finished = 'engine_requests_finished_total{{finish_reason="stop"}} {}\n'
    assert interval(finished.format(5), finished.format(4)).other_server
    assert interval(process("supervisor", 1.0, 100.0), process("supervisor", 1.0, 160.0)).other_server
    same = process("supervisor", 1.0, 100.0)
    assert not interval(same + finished.format(5), same + finished.format(5)).other_server
