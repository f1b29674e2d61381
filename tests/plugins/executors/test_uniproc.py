"""What the executor of the engine's own process leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.device import DeviceInfo
from engine.core.errors import PluginFaultError
from engine.core.executors import clear_frames
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


class Memory:
    """Stands for the memory pool of CUDA graphs, whose destructor aborts the process if the device has failed."""


class CapturingRunner(FailingRunner):
    def __init__(self, made: list[weakref.ref[Memory]]) -> None:
        self._of_runner = Memory()
        self._made = made
        made.append(weakref.ref(self._of_runner))

    def start(self, phases: object) -> None:
        of_frame = Memory()
        self._made.append(weakref.ref(of_frame))
        super().start(phases)


@pytest.mark.parametrize("works", [True, False])
def test_uniproc_frees_memory_on_the_device_after_a_failed_start_only_if_the_device_works(
    monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    def synchronize(*arguments: object) -> None:
        if not works:
            raise RuntimeError("the device has failed")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    made: list[weakref.ref[Memory]] = []
    deployment: Any = SimpleNamespace(device=DeviceInfo(type="cuda"), make_runner=lambda: CapturingRunner(made))
    with pytest.raises(RuntimeError) as caught:
        UniprocExecutor(deployment, None).start()
    clear_frames(caught.value)  # as core does
    gc.collect()
    assert [one() is None for one in made] == [works, works]


def test_uniproc_frees_the_weights_when_it_shuts_down(
    make_engine: Callable[..., Any], checkpoint: Path, count_tensors: Callable[[], int]
) -> None:
    before = count_tensors()
    engine = make_engine(model=str(checkpoint))
    assert count_tensors() > before
    engine.close()
    assert count_tensors() == before


def test_uniproc_frees_the_weights_of_a_draft_model_when_it_shuts_down(
    make_engine: Callable[..., Any], tmp_path: Path, count_tensors: Callable[[], int]
) -> None:
    """The modules of another library, of the draft model alone, refer to themselves."""
    target, draft = (make_checkpoint(tmp_path / name, name, tokenizer=True) for name in ("llama", "gpt2"))
    before = count_tensors()
    engine = make_engine(model=str(target), speculator="draft_model", speculator__model=str(draft))
    assert count_tensors() > before
    engine.close()
    assert count_tensors() == before
