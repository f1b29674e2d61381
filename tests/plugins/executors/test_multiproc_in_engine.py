"""The real runner in its own process, in a whole engine: its errors, its plugins, its death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from engine.core import Engine, SamplingParams
from engine.core.errors import CapacityError, ExecutorError, PluginError
from engine.core.hooks import hookimpl
from engine.core.plugin_host.load import load_plugins
from engine.plugins.executors import multiproc
from engine.plugins.executors.control_messages import Launch
from tests.core.told_speculator import Told

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * row + 3 * column) % 256 for column in range(5 + 13 * row)] for row in range(6)]


def build(checkpoint: Path, **settings: Any) -> Engine:
    common = {"executor__device": "cpu", "executor__threads": 1, "cache__memory": "8MiB", "model__max_len": 256}
    return Engine(model=str(checkpoint), **{**common, **settings})


@pytest.fixture(scope="module")
def engine(engine_checkpoint: Path) -> Iterator[Engine]:
    with build(
        engine_checkpoint,
        executor="multiproc",
        scheduler__max_batch_tokens=40,
        speculator=Told,
        speculator__length="fixed",
    ) as made:
        yield made


def test_drafts_give_the_tokens_of_steps_that_overlap(engine: Engine) -> None:
    expected = [made.token_ids for made in engine.generate(PROMPTS, GREEDY)]
    for wrong_every in (1, 3, 0):
        Told.tell(dict(zip(map(tuple, PROMPTS), expected, strict=True)), wrong_every)
        assert [made.token_ids for made in engine.generate(PROMPTS, GREEDY)] == expected
    Told.tell({})
    stats = engine.stats().speculation
    assert stats is not None
    assert sum(stats.accepted) > 0


@pytest.mark.parametrize(("speculator", "speculates"), [(Told, True), (None, False)])
def test_workers_learn_whether_steps_may_have_drafts(
    engine_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, speculator: type[Told] | None, speculates: bool
) -> None:
    launches: list[Launch] = []

    def begin(module: str, launch: Launch, *others: object) -> None:
        launches.append(launch)
        raise ExecutorError("no worker is started")

    monkeypatch.setattr(multiproc, "WorkerProcess", begin)
    with pytest.raises(ExecutorError, match="no worker is started"):
        build(engine_checkpoint, executor="multiproc", speculator=speculator)
    assert [launch.speculates for launch in launches] == [speculates]


def test_closed_stream_frees_its_blocks(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[5], GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.stats().blocks_used == 0
    assert not engine.has_work


def test_engine_reports_the_phases_of_the_worker(engine: Engine) -> None:
    phases = dict(engine.cache_info.phases)
    assert {"checkpoint", "executor", "import", "plugins", "model", "weights", "memory", "kv_cache"} <= set(phases)
    assert all(seconds >= 0 for seconds in phases.values())


def test_model_that_does_not_fit_is_a_capacity_error(engine_checkpoint: Path) -> None:
    message = r"(?s)^the worker of rank 0 \(process \d+\) failed in memory: .*--kv-memory"
    with pytest.raises(CapacityError, match=message):
        build(engine_checkpoint, executor="multiproc", cache__memory="1KiB")


def test_start_names_plugins_that_workers_lack(engine_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Here:
        @staticmethod
        @hookimpl
        def engine_started(engine: Engine) -> None:
            """Do nothing."""

    with pytest.raises(PluginError, match=r"rank 0 .* failed in plugins: this process lacks Here object .*same Python"):
        build(engine_checkpoint, executor="multiproc", plugins=load_plugins(extra=[Here()]))


def test_generate_reports_the_exit_of_a_worker(engine_checkpoint: Path) -> None:
    with build(engine_checkpoint, executor="multiproc") as made:
        stream = made.stream(PROMPTS[0], attrs.evolve(GREEDY, max_tokens=None))
        next(stream)
        executor: Any = made._executor
        os.kill(executor._workers.workers[0]._process.pid, signal.SIGKILL)
        with pytest.raises(ExecutorError, match=r"the worker of rank 0 .* was killed by SIGKILL"):
            list(stream)
        assert not made.check().ok
