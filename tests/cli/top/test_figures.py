"""Figures of an interval, from two hand-made scrapes."""

from __future__ import annotations

import json
import random
from bisect import bisect_left

import attrs
import pytest

from engine.cli.top.compute import figures, quantile
from engine.cli.top.figures import ALL, Latency
from tests.cli.top.scrapes import metrics, two_seconds

INF = float("inf")


def test_figures_are_rates_of_the_interval_and_the_state_at_its_end() -> None:
    total = figures(two_seconds()).total
    assert (total.running, total.waiting, total.deferred) == (3, 2, 1)
    assert total.finished == {"stop": 4.0, "length": 1.0}
    assert (total.prompt_tokens, total.cached_tokens, total.generated_tokens) == (500.0, 300.0, 400.0)
    assert (total.preemptions, total.steps, total.tokens_per_step) == (2.0, 50.0, 18.0)
    assert figures(two_seconds()).declined == 3.0


def test_latencies_are_quantiles_of_what_ended_in_the_interval() -> None:
    total = figures(two_seconds()).total
    assert total.first_token == Latency(count=10, p50=0.02, p95=pytest.approx(0.038))
    assert total.between_tokens == Latency(count=800, p50=0.01, p95=pytest.approx(0.019))
    assert figures(two_seconds(after=metrics())).total.first_token is None


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_quantile_is_in_the_bucket_of_the_exact_one(share: float) -> None:
    numbers = random.Random(3)
    bounds = (0.01, 0.02, 0.05, 0.1, 0.5, INF)
    for size in range(1, 60):
        values = sorted(numbers.expovariate(20) for _ in range(size))
        found = quantile({bound: sum(one <= bound for one in values) for bound in bounds}, share)
        exact = values[max(0, -int(-share * size // 1) - 1)]
        assert found is not None
        at = bisect_left(bounds, exact)
        assert (bounds[at - 1] if at else 0.0) <= found <= min(bounds[at], 0.5)


def test_a_quantile_above_the_last_bound_is_that_bound_and_of_nothing_is_none() -> None:
    assert quantile({1.0: 1.0, INF: 10.0}, 0.5) == 1.0
    assert quantile({1.0: 0.0, INF: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None


def test_the_cache_has_blocks_by_state_and_evictions_estimated_from_the_sample() -> None:
    cache = figures(two_seconds()).total.cache
    assert (cache.used, cache.cached, cache.free, cache.total) == (30, 20, 50, 100)
    assert cache.hit_rate == pytest.approx(600 / 1600)
    assert cache.evictions == pytest.approx(5 / 0.1 / 2)
    assert cache.unused == {"unfilled": 0.05}


def test_what_a_server_does_not_measure_is_none_or_empty() -> None:
    bare = figures(two_seconds(metrics(optional=False), metrics(2.0, optional=False)))
    assert (bare.total.cache.evictions, bare.total.cache.unused, bare.total.floor_share) == (None, {}, None)
    assert bare.roofline == []
    unknown = figures(two_seconds(metrics(peaks=False), metrics(2.0, peaks=False))).roofline[-1]
    assert (unknown.floor_share, unknown.bandwidth_share, unknown.flops_share) == (None, None, None)
    assert unknown.bytes_per_second == pytest.approx(5e9 * 100 / 2)


def test_the_roofline_is_per_second_of_steps_by_kind_and_of_the_interval_in_all() -> None:
    decode, prefill, whole = figures(two_seconds()).roofline
    assert [decode.kind, prefill.kind, whole.kind] == ["decode", "prefill", ALL]
    assert (decode.steps, decode.step_seconds, decode.floor_seconds) == pytest.approx((45.0, 0.01, 0.005))
    assert (decode.floor_share, decode.bandwidth_share, decode.flops_share) == pytest.approx((0.5, 0.5, 0.2))
    assert (whole.floor_share, whole.bandwidth_share, whole.flops_share) == pytest.approx((0.5, 0.25, 0.1))


def test_shares_of_peaks_are_of_all_replicas_devices() -> None:
    one, two = (figures(two_seconds(metrics(replicas=count), metrics(2.0, replicas=count))) for count in (1, 2))
    assert two.roofline[-1].bandwidth_share == pytest.approx(one.roofline[-1].bandwidth_share)
    assert two.roofline[-1].steps == 2 * one.roofline[-1].steps
    assert [load.replica for load in two.replicas] == ["0", "1"]
    assert two.total.generated_tokens == sum(load.generated_tokens for load in two.replicas)
    assert two.total.cache.unused == {"unfilled": 0.1}, "the worst of the replicas"


def test_phases_and_shares_are_those_of_engine_profile_phases() -> None:
    shown = figures(two_seconds())
    phases = {one.phase: one for one in shown.phases}
    assert phases["submit"].share == pytest.approx(0.6)
    assert sum(one.share for one in shown.phases if one.share is not None) == pytest.approx(1.0)
    assert shown.shares is not None
    assert shown.shares["device"] == pytest.approx(1.1 / 2.8)


def test_processes_have_their_cpu_time_and_none_when_they_are_new() -> None:
    shown = figures(two_seconds())
    assert [(one.role, one.number, one.cores) for one in shown.processes] == [
        ("supervisor", "0", pytest.approx(0.01)),
        ("front_end", "0", 0.5),
        ("engine", "0", pytest.approx(0.9)),
    ]
    more = {'process_cpu_seconds_total{process="worker",number="0.1"}': 30.0}
    worker = figures(two_seconds(after=metrics(2.0, more=more))).processes[-1]
    assert (worker.role, worker.number, worker.cores) == ("worker", "0.1", None)


def test_collections_are_counted_by_process() -> None:
    front_end, engine = figures(two_seconds()).collections
    assert (front_end.process, front_end.per_second, front_end.mean_pause) == ("front_end", 1.0, pytest.approx(0.0005))
    assert (engine.process, engine.per_second, engine.share) == ("engine", 2.0, pytest.approx(0.01))


def test_a_restarted_engine_process_is_said_and_counts_from_zero() -> None:
    again = metrics(0.1, restarts=1).replace("} 0.8\n", "} 9.0\n", 1)  # front ends go on counting finished requests
    shown = figures(two_seconds(after=again))
    assert shown.total.generated_tokens == pytest.approx(40.0)
    assert any("replica 0 was restarted" in text for text in shown.events)
    down = metrics(2.0).replace('engine_up{model_name="tiny",replica="0"} 1.0', 'engine_up{replica="0"} 0.0')
    assert figures(two_seconds(after=down)).events == ["the engine process of replica 0 is down"]


def test_figures_are_json() -> None:
    text = json.dumps(attrs.asdict(figures(two_seconds())), allow_nan=False)
    assert json.loads(text)["total"]["first_token"]["p50"] == 0.02
