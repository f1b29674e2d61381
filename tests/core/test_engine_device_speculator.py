"""Whole engines with a speculator on the device that a third party wrote: without layers, and with faults."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core import Engine, SamplingParams, build_step_loop, step_loop
from engine.core.errors import ExecutorError, PluginError
from engine.core.executors.step_times import measure_step_times
from engine.core.layers import LayerFactory
from engine.core.models import ForwardPass, ModelSpec
from engine.core.speculators import DeviceSpeculator, DrafterShape, DrafterSpec, TargetRows
from engine.core.speculators.step_timing import StepTiming
from engine.core.types import SpeculationStats
from engine.testing.checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


class Same(DeviceSpeculator[None]):
    """Proposes token 0. Has neither layers nor a checkpoint."""

    api = "2"

    @classmethod
    def shape(cls, spec: DrafterSpec, options: None) -> DrafterShape:
        nothing = ModelSpec(
            num_layers=0,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            hidden_size=1,
            vocab_size=spec.vocab_size,
            max_len=spec.max_len,
            sliding_windows=(),
            scale=1.0,
        )
        return DrafterShape(model_spec=nothing)

    def __init__(self, spec: DrafterSpec, layers: LayerFactory, options: None) -> None:
        layers.ignore("*")

    def observe(self, run: ForwardPass, target: TargetRows) -> torch.Tensor:
        return torch.zeros(len(run.batch.tokens), 1)

    def advance(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), dtype=torch.int64)


class Failing(Same):
    """Raises in a step after the first ones."""

    fails: ClassVar[bool] = False

    def advance(self, run: ForwardPass, hidden: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise LookupError("no table")
        return hidden


class Wrong(Same):
    def choose(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden))


class Raising(Same):
    @classmethod
    def shape(cls, spec: DrafterSpec, options: None) -> DrafterShape:
        raise LookupError("no table")


@pytest.fixture(scope="module")
def monotone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that always generates token 0."""
    path = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=True)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(autouse=True)
def _working() -> Iterator[None]:
    yield
    Failing.fails = False


def build(model: Path, speculator: type[DeviceSpeculator[Any]], **settings: Any) -> Engine:
    usual = {"executor__device": "cpu", "cache__memory": "8MiB", "model__max_len": 256, "model__dtype": "float32"}
    return Engine(model=str(model), speculator=speculator, **{**usual, **settings})


def speculation(engine: Engine) -> SpeculationStats:
    stats = engine.stats().speculation
    assert stats is not None
    return stats


def test_a_speculator_without_layers_proposes(monotone: Path) -> None:
    with build(monotone, Same, speculator__length="fixed") as engine:
        before = engine.stats().steps
        [done] = engine.generate([(5, 6, 7)], GREEDY)
        assert set(done.token_ids) == {0}
        assert engine.stats().steps - before <= 2 + 60 // 6
        stats = speculation(engine)
        assert stats.accepted == stats.verified


def test_executors_of_other_processes_refuse_a_device_speculator_that_is_passed_in(monotone: Path) -> None:
    with pytest.raises(PluginError, match=r"speculators 'Same' was passed in as an object.*installed plugin"):
        build(monotone, Same, executor="multiproc")


def test_auto_length_verifies_drafts_where_a_step_takes_as_long_with_as_without(
    monotone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = itertools.count()

    def clock() -> float:
        """Each reading is 1 ms later than the one before, so all steps take equally long."""
        return next(readings) * 1e-3

    monkeypatch.setattr(build_step_loop, "measure_step_times", partial(measure_step_times, clock=clock))
    monkeypatch.setattr(step_loop, "StepTiming", partial(StepTiming, clock=clock))
    with build(monotone, Same, speculator__length="auto", model__max_len=512) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True)
        engine.generate([(5, 6, 7)], params)
        stats = speculation(engine)
        assert sum(stats.verified) > 0
        assert stats.accepted == stats.verified


def test_an_error_in_a_step_names_the_speculator(monotone: Path) -> None:
    with build(monotone, Failing, speculator__length="fixed") as engine:
        Failing.fails = True
        with pytest.raises(ExecutorError, match=r"speculator 'Failing'.* in advance\(\).*LookupError: no table"):
            engine.generate([(5, 6, 7)], GREEDY)


def test_a_wrong_result_is_found_at_the_start(monotone: Path) -> None:
    with pytest.raises(ExecutorError, match=r"'Wrong'.* returned a wrong result from choose\(\)"):
        build(monotone, Wrong)


def test_an_error_before_it_is_built_names_the_speculator(monotone: Path) -> None:
    with pytest.raises(PluginError, match=r"'Raising'.* failed in shape\(\): LookupError: no table"):
        build(monotone, Raising)
