"""What the Ray executor and its actors do without a cluster, and without Ray."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core import Engine
from engine.core.config.tree import EngineConfig, ExecutorConfig
from engine.core.device import DeviceInfo
from engine.core.errors import ConfigError, PluginError
from engine.core.shm import RingTimeoutError
from engine.plugins.executors import ray as executor
from engine.plugins.executors.ray import Options, RayExecutor
from engine.plugins.executors.ray_actor import Inbox


def test_steps_are_taken_in_their_order_and_answered_in_it() -> None:
    inbox = Inbox()
    second, third = inbox.put(1, b"1"), inbox.put(2, b"2")
    with pytest.raises(RingTimeoutError):
        inbox.take(0.01)
    first = inbox.put(0, b"0")
    assert [inbox.take(1.0) for _ in range(3)] == [b"0", b"1", b"2"]
    inbox.answer(b"zero")
    assert first.result(0) == b"zero"
    assert not second.done()
    inbox.answer(b"one")
    inbox.answer(b"two")
    assert (second.result(0), third.result(0)) == (b"one", b"two")


def test_steps_that_come_in_several_threads() -> None:
    inbox = Inbox()
    threads = [threading.Thread(target=inbox.put, args=(number, b"%d" % number)) for number in range(50)]
    for thread in reversed(threads):
        thread.start()
    assert [inbox.take(10.0) for _ in threads] == [b"%d" % number for number in range(50)]
    for thread in threads:
        thread.join()


def test_the_extra_is_named_where_ray_is_missing(monkeypatch: pytest.MonkeyPatch, engine_checkpoint: Path) -> None:
    monkeypatch.setattr(executor, "find_spec", lambda name: None)
    with pytest.raises(PluginError, match=r"Ray is not installed; install it with `pip install 'ray>="):
        Engine(model=str(engine_checkpoint), executor="ray", executor__device="cpu")


def test_only_a_cluster_needs_ray_and_only_a_model_torch() -> None:
    """Other executors work where Ray is missing, and an actor can still choose which GPUs torch sees."""
    code = "import sys, engine.plugins.executors.ray; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("device", "refused"), [("cuda:0", True), ("cuda:1", True), ("cuda", False), ("auto", False)])
def test_gpus_are_ray_s_to_choose(monkeypatch: pytest.MonkeyPatch, device: str, refused: bool) -> None:
    monkeypatch.setattr(executor, "find_spec", lambda name: object())
    config = EngineConfig(executor=ExecutorConfig(device=device, tensor_parallel=2))
    told = RayExecutor.refuses(config, DeviceInfo(type="cuda"))
    assert (told is not None) == refused
    assert not refused or f"{device} cannot be asked for; use --device cuda" in str(told)


def test_what_it_is_given() -> None:
    parts: Any = SimpleNamespace(choices=(), manifest=())
    with pytest.raises(ConfigError, match="on a node of the cluster itself, not behind a Ray Client"):
        RayExecutor(EngineConfig(), parts, Options(address="ray://127.0.0.1:10001"))
    parts.choices = (SimpleNamespace(extension_point="models", name="Mine", provenance="object"),)
    with pytest.raises(PluginError, match="models 'Mine' was passed in as an object, which other processes cannot"):
        RayExecutor(EngineConfig(), parts, Options())
