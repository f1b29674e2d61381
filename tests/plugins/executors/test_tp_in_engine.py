"""Ranks in processes of their own share a model: the same tokens as one, and one rank's death ends all."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.core.config.tree import EngineConfig, ExecutorConfig, ModelConfig
from engine.core.device import DeviceInfo
from engine.core.distributed.rendezvous import Rendezvous
from engine.core.errors import ExecutorError, PluginError
from engine.core.executors import Deployment
from engine.core.grammars.grammar import Grammar
from engine.core.plugin_host.load import load_plugins
from engine.core.startup import Phases
from engine.plugins.executors import tp
from engine.plugins.executors.control_messages import Assignment
from engine.plugins.executors.worker_loop import make_runner
from tests.core.told_speculator import Told

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(6)]

EDITED = (
    attrs.evolve(GREEDY, frequency_penalty=0.8, temperature=0.7, seed=2),
    attrs.evolve(GREEDY, grammar=Grammar.regex("[a-f]{24,30}"), temperature=0.7, seed=2, ignore_eos=False),
)
"""Their next token depends on those before by more than the logits."""


def build(checkpoint: Path, **settings: Any) -> Engine:
    common = {"executor__device": "cpu", "executor__threads": 1, "cache__memory": "8MiB", "model__max_len": 256}
    return Engine(model=str(checkpoint), **{**common, **settings})


def test_the_same_tokens_as_one_rank_and_the_death_of_one_of_two(engine_checkpoint: Path) -> None:
    with build(engine_checkpoint) as one:
        expected = [made.token_ids for made in one.generate(PROMPTS, GREEDY)]
    with build(engine_checkpoint, executor__tensor_parallel=2, speculator=Told, speculator__length="fixed") as two:
        for wrong_every in (3, 0):
            Told.tell(dict(zip(map(tuple, PROMPTS), expected, strict=True)), wrong_every)
            steps = two.stats().steps
            assert [made.token_ids for made in two.generate(PROMPTS, GREEDY)] == expected
        assert two.stats().steps - steps < GREEDY.max_tokens / 4
        Told.tell({})
        for asked in EDITED:
            alone = [made.token_ids for made in two.generate(PROMPTS, asked)]
            Told.tell(dict(zip(map(tuple, PROMPTS), alone, strict=True)), 3)
            steps = two.stats().steps
            assert [made.token_ids for made in two.generate(PROMPTS, asked)] == alone
            assert two.stats().steps - steps < max(map(len, alone)) - 3
            Told.tell({})
        executor: Any = two._executor
        stream = two.stream(PROMPTS[0], attrs.evolve(GREEDY, max_tokens=None))
        next(stream)
        os.kill(executor._workers.workers[1]._process.pid, signal.SIGKILL)
        with pytest.raises(ExecutorError, match=r"the worker of rank 1 \(process \d+\) was killed by SIGKILL"):
            list(stream)
        assert not two.check().ok


def test_executor_refuses_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for first, ranks, refusal in (
        (0, 2, None),
        (1, 2, None),
        (1, 3, "there are 2 GPUs from cuda:1 on, and --tp asks for 3; use --tp 2"),
    ):
        config = EngineConfig(model=ModelConfig(path="x"), executor=ExecutorConfig(tensor_parallel=ranks))
        assert tp.TensorParallelExecutor.refuses(config, DeviceInfo(type="cuda", index=first)) == refusal


def test_worker_asks_its_executor_about_the_first_device(
    engine_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("asked")
    module.Asked = type(
        "Asked", (tp.TensorParallelExecutor,), {"refuses": classmethod(lambda _, __, device: device.name)}
    )
    monkeypatch.setitem(sys.modules, "asked", module)
    assignment = Assignment(
        config=EngineConfig(model=ModelConfig(path=str(engine_checkpoint))),
        executor="asked:Asked",
        manifest=load_plugins().manifest(),
        device="cpu",
        first_device=DeviceInfo(type="cpu", name="the first"),
        rendezvous=Rendezvous(rank=1, ranks=2, place=""),
    )
    with pytest.raises(PluginError, match=r"refuses: the first$"):
        make_runner(assignment, Phases(None))


@pytest.mark.parametrize("speculates", [False, True])
def test_worker_expects_drafts_of_a_speculator_that_only_the_engine_has(
    engine_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, speculates: bool
) -> None:
    monkeypatch.setattr(Deployment, "make_runner", lambda self, group: self)
    assignment = Assignment(
        config=EngineConfig(model=ModelConfig(path=str(engine_checkpoint))),
        executor="engine.plugins.executors.multiproc:MultiprocExecutor",
        manifest=load_plugins().manifest(),
        device="cpu",
        first_device=DeviceInfo(type="cpu"),
        rendezvous=Rendezvous(rank=0, ranks=1, place=""),
        speculates=speculates,
    )
    deployment: Any = make_runner(assignment, Phases(None))
    assert deployment.parts.speculates is speculates
