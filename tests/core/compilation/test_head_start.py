"""What a start on a GPU begins early, in threads."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from engine.core.compilation import first_start, head_start
from engine.core.compilation.head_start import begin_compiler_key, begin_driver
from engine.core.config.tree import EngineConfig, ExecutorConfig
from engine.ops.common import cuda_driver


class Driver:
    """Notes the flags that it is initialized with."""

    def __init__(self, name: str) -> None:
        self.flags: list[int] = []
        assert name == cuda_driver.LIBRARY
        assert os.environ[head_start.MODULE_LOADING] == "LAZY"
        DRIVERS.append(self)

    def cuInit(self, flags: int) -> int:  # noqa: N802
        self.flags.append(flags)
        return 0


DRIVERS: list[Driver] = []


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(first_start, "_has_gpu", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(head_start.MODULE_LOADING, "")  # so that it is as before when the test has ended
    monkeypatch.delenv(head_start.MODULE_LOADING)
    DRIVERS.clear()


def ended(thread: Any) -> None:
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()


def test_the_driver_is_initialized_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Driver)
    ended(begin_driver(EngineConfig()))
    assert [driver.flags for driver in DRIVERS] == [[0]]


def test_without_the_library_of_the_driver_the_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Any] = []
    monkeypatch.setattr("threading.excepthook", failures.append)

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    ended(begin_driver(EngineConfig()))
    assert failures == []


def test_the_digest_of_the_compiler_is_remembered() -> None:
    from triton.runtime.cache import triton_key

    triton_key.cache_clear()
    ended(begin_compiler_key(EngineConfig()))
    assert triton_key.cache_info().currsize == 1


def test_nothing_begins_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start, "_begin", lambda *_: pytest.fail("a thread was started"))
    config = EngineConfig(executor=ExecutorConfig(device="cpu"))
    assert begin_driver(config) is None
    assert begin_compiler_key(config) is None
    assert head_start.MODULE_LOADING not in os.environ
