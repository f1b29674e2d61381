"""docs/kernels.md: what it names exists, and its examples work as they stand there."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.core.autotune import TuningTask, group_calls, measure, pick_fastest
from engine.core.device import DeviceInfo
from engine.core.layers import LayerFactory, Linear
from engine.core.plugin_host import load_plugins
from engine.core.weights import DummySource, load_weights

TEXT = (Path(__file__).parent.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
PYTHON = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE))
INPUTS, OUTPUTS = 192, 96

Example = Callable[[str], ModuleType]


class ClockTimer:
    """The tuner's timer, by the clock."""

    def prepare(self, wanted: Sequence[tuple[TuningTask, Sequence[Any]]]) -> None:
        pass

    def seconds(self, task: TuningTask, candidate: Any) -> float:
        x = torch.randn(task.rows // 8, task.op.inputs).to(task.op.dtype)
        begin = time.perf_counter()
        task.op.run(candidate, x, task.operands[0])
        return time.perf_counter() - begin


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Imports an example by its module name."""
    for name, source in PYTHON.items():
        (tmp_path / name).write_text(source)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module


def make_layer(plugin: ModuleType, name: str) -> tuple[Linear, torch.Tensor]:
    """A linear layer of the plugin's method in float16, and the weight that it was filled with."""
    method = load_plugins(extra=[plugin]).quant.get(name).load()
    assert method.refuses(None, DeviceInfo(type="cpu")) is None
    factory = LayerFactory(dtype="float16", device="cpu", quant=method.from_checkpoint(None, None), fused=True)
    linear = factory.linear([("layer", OUTPUTS)], INPUTS)
    load_weights(factory, DummySource())
    plain = LayerFactory(dtype="float16", device="cpu")
    same = plain.linear([("layer", OUTPUTS)], INPUTS)
    load_weights(plain, DummySource())
    return linear, same(torch.eye(INPUTS).half()).t()


def error(linear: Linear, weight: torch.Tensor, rows: int) -> float:
    """Relative error of the layer's product with random rows."""
    x = torch.randn(rows, INPUTS).half()
    exact = F.linear(x.double(), weight.double())
    return float((linear(x).double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(engine\.ops\.[\w.]+)", TEXT))))
def test_what_the_page_names_exists(path: str) -> None:
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)


def test_methods_that_the_page_names_exist() -> None:
    from engine.ops.experts.experts_mlp import ExpertsWeights
    from engine.ops.gemm.scaled_matmul import W8A8Tile, compile_matmul
    from engine.ops.gemm.skinny_launch import GemmShape, SkinnyLaunch
    from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul

    assert all(callable(one) for one in (compile_matmul, SkinnyLaunch.compile, WeightOnlyMatmul.compile, W8A8Tile.fits))
    assert ExpertsWeights is not None
    assert GemmShape(epilogue="gated", outputs=8, inputs=8, dtype="float16").weight_rows == 16


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [1, 70])
def test_a_plugin_multiplies_by_a_kernel(rows: int, example: Example) -> None:
    linear, weight = make_layer(example("int8_tiles"), "int8-tiles")
    assert 1e-4 < error(linear, weight, rows) < 0.03


@pytest.mark.interpreter
def test_a_plugin_has_its_tiles_measured(example: Example) -> None:
    plugin = example("tuned_tiles")
    linear, weight = make_layer(plugin, "tuned-tiles")
    tasks = group_calls(linear.autotuned_calls())
    assert [task.rows for task in tasks] == [64, 4096]
    assert tasks[0].op.key == f"tuned-tiles {OUTPUTS}x{INPUTS} float16"
    assert len(tasks[0].op.version) == 16
    assert linear.kernel.tile(64) == plugin.TILES[0]  # type: ignore[attr-defined]
    for task, timings in zip(tasks, measure(tasks, ClockTimer()), strict=True):
        assert list(timings) == list(plugin.TILES[: 2 if task.rows == 64 else 3])
        assert pick_fastest(task, timings)[1].default == str(plugin.TILES[0])
        task.choose(plugin.TILES[1])
    assert linear.kernel.tile(1) == linear.kernel.tile(65) == linear.kernel.tile(9999) == plugin.TILES[1]  # type: ignore[attr-defined]
    assert error(linear, weight, 20) < 0.03


def test_a_method_refuses_what_it_cannot_serve(example: Example) -> None:
    method = example("int8_tiles").Int8Tiles
    assert "unquantized checkpoint" in method.refuses({"quant_method": "gptq"}, DeviceInfo(type="cpu"))
    old = DeviceInfo(type="cuda", name="V100", capability=(7, 0))
    assert "V100 has no tensor cores for int8" in method.refuses(None, old)
