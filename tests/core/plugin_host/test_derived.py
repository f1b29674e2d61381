"""Settings that follow from the device."""

from __future__ import annotations

import pytest
from attrs import evolve

from engine.core.config.tree import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig, SpeculatorConfig
from engine.core.device import DeviceInfo
from engine.core.host import Host
from engine.core.models.base import KVShape, ModelSpec, StateShape
from engine.core.plugin_host.derived import fit_running, refuses_ranks, settle

CPU = DeviceInfo(type="cpu", memory_bytes=10**12)
SMALL_GPU = DeviceInfo(type="cuda", memory_bytes=24 * 2**30)
LARGE_GPU = DeviceInfo(type="cuda", memory_bytes=80 * 10**9)


@pytest.mark.parametrize(
    ("device", "tokens", "running"), [(CPU, 2048, 256), (SMALL_GPU, 8192, 256), (LARGE_GPU, 8192, 1024)]
)
def test_a_step_is_as_large_as_the_device_suggests(device: DeviceInfo, tokens: int, running: int) -> None:
    scheduler = settle(EngineConfig(), device).scheduler
    assert (scheduler.max_batch_tokens, scheduler.max_running) == (tokens, running)


def test_fewer_requests_run_where_each_has_several_rows_of_drafts() -> None:
    config = EngineConfig(speculator=SpeculatorConfig(name="mine"))
    assert settle(config, LARGE_GPU).scheduler.max_running == 256
    assert settle(EngineConfig(), LARGE_GPU, drafts=True).scheduler.max_running == 256


@pytest.mark.parametrize(
    ("device", "ranks", "running"),
    [(LARGE_GPU, 1, 99), (LARGE_GPU, 2, 199), (CPU, 2, 256), (DeviceInfo(type="cpu", memory_bytes=10**9), 2, 1)],
)
def test_fewer_requests_run_where_their_states_take_much_memory(
    device: DeviceInfo, ranks: int, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "free_memory", lambda _: 10**12)
    keys, state = KVShape(num_heads=2, num_kv_heads=2, head_dim=8), StateShape(tensors=(((10**5, 250), "float32"),))
    config = settle(EngineConfig(executor=ExecutorConfig(tensor_parallel=ranks)), device)
    assert fit_running(config, with_layers(), device) == config
    assert fit_running(config, with_layers(keys, keys), device) == config
    assert fit_running(config, with_layers(state), evolve(device, memory_bytes=0)) == config, "the memory is unknown"
    assert fit_running(config, with_layers(state, keys, state), device).scheduler.max_running == running


@pytest.mark.parametrize(
    ("device", "fraction", "free", "running"),
    [
        (LARGE_GPU, 0.2, 0, 79),
        (LARGE_GPU, 0.6, 0, 199),
        (CPU, 0.0, 4 * 10**9, 9),
        (CPU, 0.125, 16 * 10**9, 9),  # as one of four replicas
    ],
)
def test_fewer_requests_run_when_the_engine_may_use_little_memory(
    device: DeviceInfo, fraction: float, free: int, running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "free_memory", lambda _: free)
    state = StateShape(tensors=(((10**5, 250), "float32"),))
    config = settle(EngineConfig(cache=CacheConfig(memory_fraction=fraction)), device)
    assert fit_running(config, with_layers(state), device).scheduler.max_running == running


def test_ranks_that_cannot_share_the_states_are_refused() -> None:
    keys, state = KVShape(num_heads=4, num_kv_heads=2, head_dim=8), StateShape(tensors=(((6, 9), "float32"),))
    assert refuses_ranks(with_layers(state), 3) is None
    refusal = refuses_ranks(with_layers(state), 4)
    assert refusal is not None
    assert "share this model's states of 6 rows evenly; these numbers of ranks can: 1, 2, 3, 6" in refusal
    refusal = refuses_ranks(with_layers(state, keys), 4)
    assert refusal is not None
    assert "key and value heads and states of 6 rows evenly; these numbers of ranks can: 1, 2" in refusal


def with_layers(*caches: KVShape | StateShape) -> ModelSpec:
    return ModelSpec(
        num_layers=len(caches) or 2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=16,
        vocab_size=99,
        max_len=512,
        sliding_windows=(None,) * (len(caches) or 2),
        scale=1.0,
        layer_caches=caches,
    )


def test_a_step_is_as_large_as_the_settings_say() -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_batch_tokens=100, max_running=7))
    assert settle(config, LARGE_GPU) == config
