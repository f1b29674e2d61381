from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch  # noqa: F401  (it opens what stays open)

from engine.core.config.tree import EngineConfig, ExecutorConfig, ModelConfig
from engine.core.device import DeviceInfo
from engine.core.executors.deployment import Deployment
from engine.core.types import Step
from engine.plugins.executors import multiproc, worker_process, workers
from engine.plugins.executors.multiproc import MultiprocExecutor, Options


class FakeExecutor(MultiprocExecutor):
    """Its workers have no model; see fake_worker.py."""

    worker = "fake_worker"


@pytest.fixture(scope="session")
def make_deployment() -> Callable[..., Deployment]:
    """make_deployment(config, *choices): on the CPU, without a checkpoint; choices: the plugins it says it has."""

    def make(config: EngineConfig, *choices: object) -> Deployment:
        parts: Any = SimpleNamespace(choices=choices, manifest=(), drafter=None, speculates=False)
        checkpoint: Any = None
        return Deployment(config, parts, checkpoint, DeviceInfo(type="cpu"))

    return make


@pytest.fixture
def make_executor(
    make_deployment: Callable[..., Deployment], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FakeExecutor]]:
    """make_executor(ranks, step_timeout=..., **behaviour of fake_worker.py): not started; shut down after the test.

    Whatever a test does, no process and no file descriptor is left, and nothing in /dev/shm.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    made: list[FakeExecutor] = []
    gc.collect()  # what tests before have not closed yet
    before = (descriptors(), shared_memory())

    def make(ranks: int = 1, step_timeout: float = 30.0, **behaviour: Any) -> FakeExecutor:
        config = EngineConfig(
            model=ModelConfig(path="nowhere", options=behaviour),
            executor=ExecutorConfig(device="cpu", tensor_parallel=ranks),
        )
        made.append(FakeExecutor(make_deployment(config), Options(step_timeout=step_timeout)))
        return made[-1]

    yield make
    while made:
        made.pop().shutdown()
    assert children() == []
    gc.collect()  # errors that were raised refer to what they passed through
    assert descriptors() == before[0]
    assert shared_memory() == before[1]


class Clock:
    """Stands in for the module time: the time that passes, and what a test adds."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which an executor finds that something hangs."""
    clock = Clock()
    for module in (multiproc, worker_process, workers):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def make_step() -> Callable[[int], Step]:
    """A step of this number."""
    return lambda number: Step(id=number, decodes=(1,), chunks=())


@pytest.fixture(scope="session")
def worker_pids() -> Callable[[], list[int]]:
    """The workers of this process, in the order of their start."""
    return children


def children() -> list[int]:
    """Process ids of this process's fake workers in the order of their start, including dead ones not yet reaped."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread or a process may end meanwhile
            for child in Path(f"/proc/self/task/{task}/children").read_text().split():
                command = Path(f"/proc/{child}/cmdline").read_text()
                if "fake_worker" in command or not command:
                    begun = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[19]
                    found.append((int(begun), int(child)))  # process ids wrap around
    return [child for _, child in sorted(found)]


def descriptors() -> list[str]:
    """What this process has open."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}").partition(":")[0])
    return sorted(names)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "engine" in name}


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {seconds} s"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Wait until something is so; fail if it never is."""
    return wait_until
