"""What a runner leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from engine.core import Engine
from engine.core.device import DeviceInfo
from engine.core.layers.experts import PlainExperts
from engine.core.layers.linear import PlainKernel
from engine.core.quant.base import LinearKernel, LinearSpec
from engine.core.quant.experts import ExpertsKernel, ExpertsSpec
from engine.core.runner import graph_capture
from engine.core.runner.runner import Runner
from engine.core.weights.checkpoint import Checkpoint
from engine.plugins.quant.none import Unquantized
from engine.testing.checkpoints import make_checkpoint
from tests.core.runner.test_cuda_graphs import FixedAttention
from tests.core.test_engine_device_speculator import Same
from tests.core.told_speculator import Told

T = TypeVar("T")
U = TypeVar("U")


class NoReplay:
    """Stands in for GraphCapturer: as with a CUDA graph, a replay does not hold the work that was captured."""

    def __init__(self, device: torch.device, *, extends: bool = True) -> None:
        pass

    def capture(
        self, work: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[Callable[[], None], T]:
        return (lambda: None), work()

    def capture_alike(
        self, begin: Callable[[], T], endings: Iterable[Callable[[T], U]], warm_up: Callable[[], object]
    ) -> list[tuple[Callable[[], None], U]]:
        return [((lambda: None), ending(begin())) for ending in endings]


class OwnKernel(PlainKernel):
    """Not of core, so that its results are checked in the first steps."""


class OwnExperts(PlainExperts):
    """As OwnKernel."""


class OwnKernels(Unquantized):
    def linear(self, spec: LinearSpec) -> LinearKernel:
        return OwnKernel(spec)

    def experts(self, spec: ExpertsSpec) -> ExpertsKernel:
        return OwnExperts(spec)


EAGER: dict[str, Any] = {"executor__graphs": "off"}
REPLAYED: dict[str, Any] = {"attention": FixedAttention, "executor__graphs": "decode", "speculator__length": "fixed"}


@pytest.mark.usefixtures("replays")
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", EAGER),
        ("gpt_oss", {"quant": OwnKernels, **EAGER}),
        ("qwen3", {"speculator": Told, **REPLAYED}),
        ("qwen3", {"speculator": Same, **REPLAYED}),
    ],
    ids=["plain", "experts with biases and checks", "drafts in replays", "a speculator on the device in replays"],
)
def test_runner_frees_all_tensors_when_it_is_dropped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count_tensors: Callable[[], int],
    architecture: str,
    settings: dict[str, Any],
) -> None:
    """Not when garbage is collected: the next engine sizes its KV cache by the memory that is free then."""
    monkeypatch.setattr(graph_capture, "GraphCapturer", NoReplay)
    path = make_checkpoint(tmp_path, architecture, tokenizer=True)
    usual: dict[str, Any] = {"executor__device": "cpu", "cache__memory": "1MiB", "model__max_len": 32}
    with Engine(model=str(path), **{**usual, **settings}) as engine:
        before = count_tensors()
        runner = Runner(engine.config, engine.parts, Checkpoint.open(path), DeviceInfo(type="cpu"))
        runner.start()
        assert count_tensors() > before
        del runner
        assert count_tensors() == before
