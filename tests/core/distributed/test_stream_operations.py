"""The functions of the CUDA driver for copies and flags between GPUs."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.distributed import stream_operations
from engine.core.distributed.stream_operations import Driver


class ImmediateResult:
    """A driver whose memory operations have a result."""

    def __init__(self, result: int) -> None:
        self.memory_operations = lambda *given: result


def test_driver_without_memory_operations_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_operations, "current_stream", lambda index: 1)

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert Driver.find(torch.device("cpu", 0)) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuMemcpyAsync=SimpleNamespace()))
    assert Driver.find(torch.device("cpu", 0)) is None, "it is too old"
    for result, usable in ((801, False), (0, True)):
        monkeypatch.setattr(Driver, "__init__", lambda self, result=result: ImmediateResult.__init__(self, result))
        assert (Driver.find(torch.device("cpu", 0)) is not None) == usable
