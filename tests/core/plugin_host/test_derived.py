"""Settings that follow from the device."""

from __future__ import annotations

import pytest

from engine.core.config.tree import EngineConfig, SchedulerConfig, SpeculatorConfig
from engine.core.device import DeviceInfo
from engine.core.plugin_host.derived import settle

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


def test_a_step_is_as_large_as_the_settings_say() -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_batch_tokens=100, max_running=7))
    assert settle(config, LARGE_GPU) == config
