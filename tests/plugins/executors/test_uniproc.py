"""What the executor of the engine's own process leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.device import DeviceInfo
from engine.core.errors import PluginFaultError
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.executors.uniproc import UniprocExecutor
from engine.testing.checkpoints import make_checkpoint


class Faulty(TorchAttention):
    """Fails once the model is loaded."""

    def __init__(self, *arguments: Any) -> None:
        raise LookupError("no table")


@pytest.fixture(params=["llama", "gpt2"], ids=["own layers", "another library's modules"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return make_checkpoint(tmp_path, request.param, tokenizer=True)


def test_uniproc_frees_the_weights_when_its_start_fails(
    make_engine: Callable[..., Any], checkpoint: Path, count_tensors: Callable[[], int]
) -> None:
    before = count_tensors()
    with pytest.raises(PluginFaultError, match="LookupError: no table") as caught:
        make_engine(model=str(checkpoint), attention=Faulty)
    assert count_tensors() == before, "while the error is kept"
    assert "no table" in str(caught.value)


class FailingRunner:
    def start(self, phases: object) -> None:
        raise RuntimeError("the first error of the device")

    def layer_references(self) -> list[Any]:
        return []


def test_uniproc_raises_the_error_of_its_start_when_the_device_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("a later error of the device")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    deployment: Any = SimpleNamespace(device=DeviceInfo(type="cuda"), make_runner=FailingRunner)
    executor = UniprocExecutor(deployment, None)
    with pytest.raises(RuntimeError, match=r"^the first error of the device$"):
        executor.start()
    assert not executor.check().ok


def test_uniproc_frees_the_weights_when_it_shuts_down(
    make_engine: Callable[..., Any], checkpoint: Path, count_tensors: Callable[[], int]
) -> None:
    before = count_tensors()
    engine = make_engine(model=str(checkpoint))
    assert count_tensors() > before
    engine.close()
    assert count_tensors() == before
