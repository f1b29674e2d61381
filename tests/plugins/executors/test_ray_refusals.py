"""What the Ray executor and its actors do without a cluster, and without Ray."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.core import Engine
from engine.core.config.tree import EngineConfig, ExecutorConfig
from engine.core.device import DeviceInfo
from engine.core.errors import ConfigError, PluginError
from engine.core.executors.deployment import Deployment
from engine.core.shm import RingTimeoutError
from engine.plugins.executors import ray as executor
from engine.plugins.executors.ray import Options, RayExecutor
from engine.plugins.executors.ray_actor import StepQueue


def test_step_queue_orders_steps_and_resolves_them_in_order() -> None:
    queue = StepQueue()
    second, third = queue.put(1, b"1"), queue.put(2, b"2")
    with pytest.raises(RingTimeoutError):
        queue.get(0.01)
    first = queue.put(0, b"0")
    assert [queue.get(1.0) for _ in range(3)] == [b"0", b"1", b"2"]
    queue.resolve(b"zero")
    assert first.result(0) == b"zero"
    assert not second.done()
    queue.resolve(b"one")
    queue.resolve(b"two")
    assert (second.result(0), third.result(0)) == (b"one", b"two")


def test_step_queue_orders_steps_of_several_threads() -> None:
    queue = StepQueue()
    threads = [threading.Thread(target=queue.put, args=(number, b"%d" % number)) for number in range(50)]
    for thread in reversed(threads):
        thread.start()
    assert [queue.get(10.0) for _ in threads] == [b"%d" % number for number in range(50)]
    for thread in threads:
        thread.join()


def test_executor_names_the_extra_when_ray_is_missing(monkeypatch: pytest.MonkeyPatch, engine_checkpoint: Path) -> None:
    monkeypatch.setattr(executor, "find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"Ray is not installed; pip install 'pluggable-llm-engine\[ray\]'"):
        Engine(model=str(engine_checkpoint), executor="ray", executor__device="cpu")


def test_importing_the_executor_imports_neither_ray_nor_torch() -> None:
    """Other executors work where Ray is missing, and an actor can still choose which GPUs torch sees."""
    code = "import sys, engine.plugins.executors.ray; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("device", "refused"), [("cuda:0", True), ("cuda:1", True), ("cuda", False), ("auto", False)])
def test_executor_refuses_a_numbered_gpu(monkeypatch: pytest.MonkeyPatch, device: str, refused: bool) -> None:
    monkeypatch.setattr(executor, "find_spec", lambda name: object())
    config = EngineConfig(executor=ExecutorConfig(device=device, tensor_parallel=2))
    refusal = RayExecutor.refuses(config, DeviceInfo(type="cuda"))
    assert (refusal is not None) == refused
    assert not refused or f"{device} cannot be asked for; use --device cuda" in str(refusal)


def test_constructor_refuses_a_ray_client_and_objects(make_deployment: Callable[..., Deployment]) -> None:
    with pytest.raises(ConfigError, match="on a node of the cluster itself, not behind a Ray Client"):
        RayExecutor(make_deployment(EngineConfig()), Options(address="ray://127.0.0.1:10001"))
    choice = SimpleNamespace(seam="models", name="Mine", provenance="object")
    with pytest.raises(PluginError, match="models 'Mine' was passed in as an object, which other processes cannot"):
        RayExecutor(make_deployment(EngineConfig(), choice), Options())
