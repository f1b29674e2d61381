"""The configuration of each replica."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from engine.core.config.server import ServerConfig
from engine.core.config.tree import CacheConfig, EngineConfig, ExecutorConfig, KVEventsConfig
from engine.core.errors import ConfigError, PluginError
from engine.server.supervisor.replicas import cores, count_gpus, finds_devices, replica_configs


def config(replicas: int, *, cache: CacheConfig | None = None, **executor: Any) -> EngineConfig:
    return EngineConfig(
        executor=ExecutorConfig(**executor), cache=cache or CacheConfig(), server=ServerConfig(replicas=replicas)
    )


def devices(config: EngineConfig, gpus: int) -> list[str]:
    return [each.executor.device for each in replica_configs(config, lambda: gpus, finds_devices)]


def must_not_count() -> int:
    raise AssertionError("the GPUs were counted")


def test_a_single_replica_keeps_the_configuration() -> None:
    made = config(1)
    assert replica_configs(made, must_not_count, finds_devices) == [made]


def test_each_replica_gets_its_own_gpus() -> None:
    assert devices(config(3), 8) == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices(config(2, device="cuda:2", tensor_parallel=2), 6) == ["cuda:2", "cuda:4"]
    assert [each.executor.threads for each in replica_configs(config(2), lambda: 2, finds_devices)] == [0, 0]


def test_each_replica_has_a_rank_in_the_events_of_the_cache() -> None:
    events = KVEventsConfig(endpoint="tcp://*:5557")
    for one in (config(3), config(3, device="cpu"), config(3, name="ray", device="cuda")):
        made = evolve(one, kv_events=events)
        assert [each.kv_events.rank for each in replica_configs(made, lambda: 8, finds_devices)] == [0, 1, 2]


def test_an_executor_that_finds_devices_is_assigned_none() -> None:
    assert devices(config(3, name="ray", device="cuda"), 1) == ["cuda"] * 3
    assert devices(config(2, name="ray"), 0) == ["cpu"] * 2
    assert devices(config(2, name="tp", tensor_parallel=2), 4) == ["cuda:0", "cuda:2"]
    with pytest.raises(PluginError, match="nonesuch"):
        devices(config(2, name="nonesuch"), 2)


@pytest.mark.parametrize(
    ("made", "gpus", "words"),
    [
        (config(3), 2, "3 replicas need 3 GPUs from cuda:0 on, and there are 2; use --replicas 2"),
        (
            config(2, device="cuda:1", tensor_parallel=2),
            4,
            "of 2 GPUs each need 4 GPUs from cuda:1 on, and there are 3",
        ),
        (config(2, tensor_parallel=4), 2, "need 8 GPUs from cuda:0 on, and there are 2; use --tp 2"),
        (config(2, device="cuda"), 0, "need 2 GPUs from cuda:0 on, and there are 0; use --device cpu"),
    ],
)
def test_too_few_gpus_are_refused(made: EngineConfig, gpus: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replica_configs(made, lambda: gpus, finds_devices)
    assert words in str(caught.value)


def test_replicas_share_a_cpu() -> None:
    for made, count in ((config(2, device="cpu"), must_not_count), (config(2), lambda: 0)):
        first, second = replica_configs(made, count, finds_devices)
        assert first == second
        assert first.executor.device == "cpu"
        assert first.executor.threads == max(1, cores() // 2)
        assert first.cache.memory_fraction == 0.25
    (given, _) = replica_configs(
        config(2, device="cpu", threads=7, cache=CacheConfig(memory="1GiB")), must_not_count, finds_devices
    )
    assert given.executor.threads == 7
    assert given.cache == CacheConfig(memory="1GiB")
    (part, _) = replica_configs(
        config(2, device="cpu", cache=CacheConfig(memory_fraction=0.8)), must_not_count, finds_devices
    )
    assert part.cache.memory_fraction == 0.4


def test_an_unknown_device_is_left_for_the_engine_to_refuse() -> None:
    assert devices(config(2, device="tpu"), 4) == ["tpu", "tpu"]


def test_count_gpus_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    assert count_gpus() == torch.cuda.device_count()
