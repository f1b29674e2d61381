"""The executor of a deployment is constructed by the version of the contract that its class names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.config.tree import EngineConfig
from engine.core.device import DeviceInfo, find_device
from engine.core.errors import PluginError
from engine.core.executors.deployment import Deployment, make_executor
from engine.core.plugin_host.extension_points import EXTENSION_POINTS
from engine.core.plugin_host.selection import Parts
from engine.core.runner.runner import Runner
from engine.core.types import SamplingParams
from engine.core.weights.checkpoint import Checkpoint
from engine.plugins.executors.uniproc import UniprocExecutor

[POINT] = [point for point in EXTENSION_POINTS if point.name == "executors"]


class Recorded(UniprocExecutor):
    """Keeps the arguments of its constructor."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


class First(Recorded):
    api = "1"


class Second(Recorded):
    api = "2"


def deployment(executor: type[Recorded]) -> Deployment:
    parts: Any = SimpleNamespace(executor=executor, options={"executors": "options"})
    checkpoint: Any = object()
    return Deployment(EngineConfig(), parts, checkpoint, DeviceInfo(type="cpu"))


def test_an_executor_of_version_2_is_given_the_deployment() -> None:
    given = deployment(Second)
    executor: Any = make_executor(given)
    assert executor.arguments == (given, "options")


def test_an_executor_of_version_1_is_given_config_and_parts() -> None:
    given = deployment(First)
    executor: Any = make_executor(given)
    assert executor.arguments == (given.config, given.parts, "options")


@pytest.mark.parametrize("executor", [First, Second])
def test_both_versions_are_accepted(executor: type[Recorded]) -> None:
    POINT.check(executor, "executor 'mine'")


def test_another_version_is_refused_with_the_accepted_ones() -> None:
    class Third(Recorded):
        api = "3"

    with pytest.raises(PluginError, match=r"api = '3', but this engine has version '2' \(and accepts '1'\) of engine"):
        POINT.check(Third, "executor 'mine'")


class OldExecutor(UniprocExecutor):
    """Written for version 1: opens the checkpoint and finds the device itself."""

    api = "1"

    def __init__(self, config: EngineConfig, parts: Parts, options: Any) -> None:
        checkpoint = Checkpoint.open(config.model.path, generation_config=config.model.generation_config)
        device = find_device(config.executor.device)
        super().__init__(Deployment(config, parts, checkpoint, device), options)
        self._runner = Runner(config, parts, checkpoint, device)


def test_an_executor_of_version_1_generates_the_same_tokens(make_engine: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens = [
        make_engine(executor=executor).generate([[1, 2, 3]], params)[0].token_ids
        for executor in (OldExecutor, UniprocExecutor)
    ]
    assert tokens[0] == tokens[1]
