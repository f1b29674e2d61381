"""benchmarks/ten_loads.py: its bounds, the ages of its first requests, its window, and a run on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli.bench.roofline import stored_cost
from engine.core.config.tree import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig
from engine.core.device import DeviceInfo

SCRIPTS = Path(__file__).resolve().parents[1] / "benchmarks"

CACHE_TOKENS = 1.92e6
BOUNDS = {
    "128/128": (38_500, 39_200, 44_500),
    "128/2048": (31_000, 33_700, 45_700),
    "128/4096": (19_900, 22_000, 24_200),
    "500/2000": (24_600, 26_800, 35_100),
    "1000/1000": (20_200, 21_700, 35_100),
    "1000/2000": (19_000, 20_800, 26_300),
    "2048/128": (4_220, 4_310, 5_030),
    "2048/2048": (12_850, 14_090, 17_100),
    "5000/500": (4_490, 4_730, 7_790),
    "20000/2000": (1_940, 2_130, 2_510),
}
"""Computed by hand for an 8B model in 8 bits, with an 8-bit cache of 1.92 million tokens, to three or four digits:
serial, serial with attention at 97 % of the bandwidth, overlap."""


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import ten_loads  # type: ignore[import-not-found]

    return ten_loads


@pytest.fixture
def bounds(loads: Any) -> Any:
    return sys.modules["load_bounds"]


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_equal_those_computed_by_hand(name: str, loads: Any, bounds: Any) -> None:
    inputs, outputs = loads.parse_case(name)
    batch = bounds.steady_batch(inputs, outputs, CACHE_TOKENS)
    kv_bytes = 65_536 * bounds.mean_context(inputs, outputs)
    cost = bounds.TokenCost(flops=15.0e9, weight_bytes=8e9, kv_bytes=kv_bytes, prompt_flops=14.0e9)
    rates = bounds.Rates(bandwidth=4.28e12, flops=1.4e15, prompt_tokens=85_000)
    found = bounds.find_bound(inputs, outputs, cost, rates, batch)
    assert (found.serial, found.serial_best, found.overlap) == pytest.approx(BOUNDS[name], rel=0.003)


def test_token_cost_follows_from_the_model(loads: Any, bounds: Any) -> None:
    fp8 = loads.MODELS["llama-3.1-8b"] | {
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}
    }
    config = EngineConfig(
        model=ModelConfig(dtype="bfloat16"),
        cache=CacheConfig(dtype="float8_e4m3fn"),
        executor=ExecutorConfig(device="cpu"),
    )
    cost = bounds.token_cost(stored_cost(config, fp8, DeviceInfo(type="cpu")), 1000, 1000, 1280)
    assert cost.kv_bytes == 65_536 * 1500
    assert cost.flops == pytest.approx(15.0e9, rel=0.01)
    assert cost.weight_bytes == pytest.approx(8e9, rel=0.01)
    assert bounds.PROMPT_SHARE * 1.4e15 / cost.prompt_flops == pytest.approx(85_000, rel=0.01)


def test_sizes_are_limited_by_cache_batch_and_token_budget(loads: Any) -> None:
    limits = {"cache_tokens": CACHE_TOKENS, "block_size": 16, "max_running": 2048, "budget": 8192}
    by_cache = loads.find_sizes(1000, 1000, **limits)
    assert by_cache.in_flight == by_cache.decoding == int(0.98 * CACHE_TOKENS / 1508)
    by_batch = loads.find_sizes(128, 128, **limits)
    assert by_batch.in_flight == by_batch.decoding == 2048
    by_budget = loads.find_sizes(2048, 128, **limits)
    assert by_budget.in_flight == int(0.98 * CACHE_TOKENS / 2120)
    assert by_budget.decoding == 8192 * 128 // 2176


@pytest.mark.parametrize("name", BOUNDS)
def test_ages_are_even_and_contexts_average_once_the_batch_is_full(name: str, loads: Any) -> None:
    inputs, outputs = loads.parse_case(name)
    budget = 8192
    sizes = loads.find_sizes(inputs, outputs, cache_tokens=CACHE_TOKENS, block_size=16, max_running=2048, budget=budget)
    waiting = [prompt for prompt, _ in loads.spread_ages(sizes, budget)]
    prompts = list(waiting)
    assert max(prompts) < inputs + outputs
    contexts: list[int] = []  # of decoding requests
    steps = 0
    while waiting:
        contexts = [context + 1 for context in contexts]
        room = budget - len(contexts)
        while waiting and room:
            taken = min(room, waiting[0])
            room -= taken
            waiting[0] -= taken
            if not waiting[0]:
                waiting.pop(0)
                contexts.append(prompts[len(contexts)])
        steps += 1
    assert steps == pytest.approx(sizes.ramp_steps, abs=2)
    ages = sorted(context - inputs for context in contexts)
    even = [outputs * (number + 0.5) / len(ages) for number in range(len(ages))]
    assert max(abs(age - wanted) for age, wanted in zip(ages, even, strict=True)) <= max(3, 0.01 * outputs)


def progress(loads: Any, *steps: tuple[float, int, int]) -> list[Any]:
    """Counters after steps of these seconds, prompt tokens and output tokens."""
    found = [loads.Progress(0.0, 0, 0, 8)]
    for seconds, prompts, outputs in steps:
        last = found[-1]
        found.append(
            loads.Progress(last.seconds + seconds, last.prompt_tokens + prompts, last.output_tokens + outputs, 8)
        )
    return found


def test_window_is_everything_when_all_is_steady(loads: Any) -> None:
    steady = progress(loads, *[(1.0, 20, 10)] * 50)
    assert loads.find_window(steady, 2, 1) == (0, 50)
    assert loads.find_window(steady, 1, 1) is None
    assert loads.find_window(steady[:1], 2, 1) is None


def test_window_leaves_out_steps_of_prompts_or_decodes_alone(loads: Any) -> None:
    mixed = progress(loads, *[(1.0, 0, 10)] * 10, *[(1.0, 20, 10)] * 80, *[(1.0, 0, 10)] * 10)
    begin, end = loads.find_window(mixed, 2, 1)
    first, last = mixed[begin], mixed[end]
    assert last.prompt_tokens - first.prompt_tokens == pytest.approx(
        2 * (last.output_tokens - first.output_tokens), rel=0.02
    )
    assert 80 <= end - begin <= 82


def test_rates_count_the_window_and_the_whole_run(loads: Any, bounds: Any) -> None:
    counters = progress(loads, (5.0, 100, 0), *[(1.0, 20, 10)] * 10, (5.0, 0, 20))
    result = loads.Result(
        name="2/1",
        sizes=loads.Sizes(2, 1, 8, 8, 1.0),
        progress=tuple(counters),
        window=(1, 11),
        preemptions=0,
        complete=True,
        bound=bounds.Bound(serial=20.0, serial_best=25.0, overlap=40.0),
    )
    assert result.steady == 10
    assert result.whole == 120 / 20
    rows = {row.metric: row for row in result.rows(loads.Published(3000, 16, 18))}
    assert rows[loads.STEADY].share == 0.5
    assert rows[loads.STEADY].baseline == 16
    assert rows[loads.WHOLE].share == 0.3
    assert rows["mean step"].value == 1000
    assert rows["goal"].value == 18


@pytest.mark.parametrize(("length", "whole"), [("--seconds=1", False), ("--requests=60", True)])
def test_loads_run_on_a_tiny_model(length: str, whole: bool, loads: Any, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    small = ["--model=tiny", "--quant=auto", "--kv-dtype=auto", "--loads=8/8,16/8", "--max-running=4", length]
    given = ["--set=executor.device=cpu", "--set=cache.memory=32MiB", "--bandwidth=0.02", "--matmul=0.1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "ten_loads.py"), *small, *given, "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["settings"]["in_flight"] == {"8/8": 4, "16/8": 4}
    assert written["settings"]["prefix_caching"] is False
    for case in ("8/8", "16/8"):
        rows = {row["metric"]: row for row in written["rows"] if row["case"] == case}
        assert 0 < rows[loads.STEADY]["share"] < 1
        assert rows[loads.WHOLE if whole else loads.CUT]["value"] > 0
        assert rows["preemptions"]["value"] == 0


def test_the_table_of_the_docs_has_the_metrics(loads: Any) -> None:
    generator = (SCRIPTS.parent / "scripts" / "result_tables.py").read_text(encoding="utf-8")
    for metric in (loads.STEADY, loads.WHOLE, loads.SERIAL, loads.SERIAL_BEST, loads.OVERLAP):
        assert f'"{metric}"' in generator


def test_a_load_that_is_none_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "ten_loads.py"), "--loads", "1000"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "'1000' is not IN/OUT" in done.stderr
