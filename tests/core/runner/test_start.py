"""The start of a runner, and the runner before it."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve

from engine.core import Engine
from engine.core.attention import kv_pool
from engine.core.attention.kv_pool import KVPool
from engine.core.device import DeviceInfo
from engine.core.host import Host
from engine.core.layers.matmul import can_pack
from engine.core.runner import lap_timer, start, trial_step
from engine.core.runner.lap_timer import LapTimer
from engine.core.runner.runner import Runner
from engine.core.runner.step import StepLauncher
from engine.core.runner.trial_step import TrialResult, TrialStep
from engine.core.schedulers.prompt_step import prompt_step
from engine.core.startup import Phases
from engine.core.types import Step
from engine.core.weights.checkpoint import Checkpoint
from engine.testing.checkpoints import make_checkpoint

CPU = DeviceInfo(type="cpu")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", tokenizer=True)
    with Engine(model=str(path), executor__device="cpu", cache__memory="1MiB", model__max_len=32) as engine:
        yield engine


@pytest.mark.parametrize(("given", "cores", "threads"), [(0, 1, 1), (0, 64, 2), (3, 1, 3)])
def test_threads_stay_within_the_cpu_quota_unless_they_are_given(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, given: int, cores: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # PyTorch's default on two cores
    monkeypatch.setattr(Host, "cores", lambda self: cores)
    config = attrs.evolve(engine.config, executor=attrs.evolve(engine.config.executor, threads=given))
    try:
        Runner(config, engine.parts, Checkpoint.open(Path(engine.config.model.path)), CPU)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_the_budget_counts_the_kernels_that_onednn_compiles(engine: Engine) -> None:
    cache = engine.cache_info
    assert cache.kernel_bytes > 0 or not can_pack(torch.empty(1, 1))
    used = cache.weights_bytes + cache.activation_bytes + cache.kernel_bytes + cache.kv_bytes
    assert used <= cache.budget_bytes < used + 2**20


def test_launch_needs_a_started_runner(engine: Engine) -> None:
    runner = Runner(engine.config, engine.parts, Checkpoint.open(Path(engine.config.model.path)), CPU)
    with pytest.raises(AssertionError, match="not started"):
        runner.launch(Step(id=0, decodes=(), chunks=()))


def test_the_trial_step_frees_its_device_state(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On return, not when garbage is collected: the KV cache is sized by the memory that is free then."""
    pools: list[weakref.ref[KVPool]] = []
    lengths: list[int] = []
    launch = StepLauncher.launch

    def noting(launcher: StepLauncher, step: Step) -> Any:
        lengths.extend(one.prompt_len for one in step.new)
        return launch(launcher, step)

    class Noted(KVPool):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pools.append(weakref.ref(self))

    monkeypatch.setattr(kv_pool, "KVPool", Noted)
    monkeypatch.setattr(StepLauncher, "launch", noting)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1100 if pools[0]() else 0)
    config = evolve(engine.config, scheduler=evolve(engine.config.scheduler, max_batch_tokens=40))
    started = start.RunnerStart(config, engine.parts, Checkpoint.open(Path(config.model.path)), CPU, group=None)
    with torch.inference_mode():
        model, layers = started._build_model()
        phases = Phases()
        with phases.phase("weights"):
            started._load_weights(layers, phases)
        assert started._run_trial_step(model, ()) == (TrialResult(activations=1000), False)
    assert [pool() for pool in pools] == [None]
    assert lengths == [32, 8]


def test_a_timed_trial_step_is_run_again_to_find_the_tokens_of_graphs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run may compile kernels."""
    launched: list[float] = []
    clock = [0.0]

    class Pending:
        tokens = ((1,),)

        def result(self) -> Any:
            clock[0] += 4
            return self

    def launch(launcher: StepLauncher, step: Step) -> Pending:
        launched.append(clock[0])
        clock[0] += 100 if len(launched) == 1 else 1
        return Pending()

    monkeypatch.setattr(StepLauncher, "launch", launch)
    monkeypatch.setattr(StepLauncher, "forget", lambda launcher, step: None)
    monkeypatch.setattr(trial_step, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    step = prompt_step([4096] * 4, [], 16)
    trial = TrialStep(step=step, device=CPU, not_built_in="")
    found = trial.measure(SimpleNamespace(), lambda call: nullcontext(), timed=True)  # type: ignore[arg-type]
    assert len(launched) == 3
    assert found.max_graph_tokens == 3584  # 1.1 / 5 of 16,384, in whole 64


@pytest.mark.parametrize(
    ("given", "captures", "expected", "activations"),
    [
        (0, True, 5000, 1000 + 1000 * (5000 - 1024) // 8192),  # of the slowest host: an all-reduce waits for it
        (0, False, 0, 1000),
        (3072, True, 3072, 1250),
        (3072, False, 0, 1000),
        (20_000, True, 8192, 1875),  # no step is larger
    ],
)
def test_memory_is_planned_for_the_largest_graph_that_will_be_captured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, given: int, captures: bool, expected: int, activations: int
) -> None:
    config = evolve(
        engine.config,
        model=evolve(engine.config.model, max_len=32),
        scheduler=evolve(engine.config.scheduler, max_batch_tokens=8192, max_running=256),
        executor=evolve(engine.config.executor, max_graph_tokens=given),
    )
    started = start.RunnerStart(config, engine.parts, Checkpoint.open(Path(config.model.path)), CPU, group=None)
    found = TrialResult(activations=1000, max_graph_tokens=3000 if captures and not given else 0)
    monkeypatch.setattr(started._group, "minimum", lambda number: min(number, -5000))
    monkeypatch.setattr(started, "_device", DeviceInfo(type="cuda"))
    monkeypatch.setattr(started, "_run_trial_step", lambda *_: (found, captures))
    monkeypatch.setattr(start, "logits_bytes", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert started._measure_step(engine, ()) == TrialResult(  # type: ignore[arg-type]
        activations=activations, max_graph_tokens=expected
    )


def test_lap_timer_adds_up_to_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 11.0, 13.0, 17.0, 25.0])
    monkeypatch.setattr(lap_timer, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    timer = LapTimer()
    for phase in ("prepare", "launch", "launch", "sample"):
        timer.end(phase)  # type: ignore[arg-type]
    assert list(timer.seconds.items()) == [("prepare", 1.0), ("launch", 6.0), ("sample", 8.0)]
