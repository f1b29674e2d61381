"""The rehearsal runs a prompt and a decode step through the executor before the first request, and leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from engine.core import build_step_loop
from engine.core.engine import Engine
from engine.core.errors import CheckpointError, ExecutorError, PluginError
from engine.core.executors.base import Health
from engine.core.executors.rehearsal import rehearse
from engine.core.runner.step import StepLauncher
from engine.core.types import FULL, CacheInfo, EngineStats, SamplingParams, Step, StepResult
from engine.plugins.attention.torch import TorchAttention
from engine.plugins.executors.uniproc import UniprocExecutor

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, repetition_penalty=1.3)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that the executor `uniproc` is given."""
    seen: list[Step] = []
    submit = UniprocExecutor.submit

    def note(executor: UniprocExecutor, step: Step) -> Any:
        seen.append(step)
        return submit(executor, step)

    monkeypatch.setattr(UniprocExecutor, "submit", note)
    return seen


def test_start_runs_a_prompt_in_two_chunks_and_a_decode_step(make_engine: Any, steps: list[Step]) -> None:
    engine = make_engine()
    first, second, decode, end = steps
    assert [(chunk.count, chunk.sample) for chunk in first.chunks] == [(1, False)]
    assert [(chunk.count, chunk.sample) for chunk in second.chunks] == [(engine.cache_info.block_size, True)]
    assert (decode.decodes, decode.chunks) == ((0,), ())
    assert (end.decodes, end.chunks, end.finished) == ((), (), (0,))
    assert "rehearsal" in dict(engine.cache_info.phases)


def test_rehearsal_leaves_no_state(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed = make_engine()
    monkeypatch.setattr(build_step_loop, "rehearse", lambda *_, **__: None)
    plain = make_engine()

    def state(engine: Any) -> Any:
        return engine._executor._runner._launcher.state

    assert rehearsed.stats().blocks_total == plain.stats().blocks_total
    for engine in (rehearsed, plain):
        stats = engine.stats()
        assert stats == EngineStats(blocks_total=stats.blocks_total, seconds=stats.seconds)
        batch, sampler = state(engine).persistent_batch, state(engine).sampler
        assert not batch._sequences
        assert not batch.take_changes()
        assert not sampler._sequences
        assert not sampler._unwritten
    assert state(rehearsed).persistent_batch._free_rows == state(plain).persistent_batch._free_rows
    prompts = [[3, 1, 4, 1, 5], [0] * 17, [2]]
    expected = [plain.generate(prompts, params) for params in (GREEDY, DRAWN)]
    found = [rehearsed.generate(prompts, params) for params in (GREEDY, DRAWN)]
    assert [[one.token_ids for one in each] for each in found] == [[one.token_ids for one in each] for each in expected]
    assert found[0][1].cached_tokens == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"model__max_len": 2},
        {"scheduler__max_batch_tokens": 1, "scheduler__max_running": 1},
        {"cache__block_size": 1},
    ],
    ids=str,
)
def test_rehearsal_fits_into_small_limits(make_engine: Any, settings: dict[str, int], steps: list[Step]) -> None:
    make_engine(**settings)
    lengths = [chunk.count for step in steps for chunk in step.chunks]
    assert lengths == ([1, 1] if "cache__block_size" in settings else [1])


@pytest.mark.parametrize(
    ("blocks", "max_running", "lengths"),
    [(8, 4, [24, 16]), (8, 2, [24]), (3, 4, [24, 16]), (2, 4, [24]), (8, 1, [])],
    ids=["tokens", "sequences", "blocks", "few blocks", "one sequence"],
)
def test_full_step_has_all_tokens_that_limits_allow(
    make_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[Step],
    blocks: int,
    max_running: int,
    lengths: list[int],
) -> None:
    def as_on_a_gpu(executor: Any, cache: Any, **limits: Any) -> None:
        assert not limits["full"]
        rehearse(executor, attrs.evolve(cache, num_blocks=blocks), **{**limits, "full": True})

    monkeypatch.setattr(build_step_loop, "rehearse", as_on_a_gpu)
    engine = make_engine(
        model__max_len=24, scheduler__max_batch_tokens=40, scheduler__max_running=max_running, cache__block_size=16
    )
    *_, full, end = steps
    assert [chunk.count for chunk in full.chunks] == lengths
    has_short_prompt = 0 < len(lengths) < max_running - 1
    assert end.finished == tuple(range(1 + has_short_prompt + len(lengths)))
    assert not engine._executor._runner._launcher.state.persistent_batch._sequences


class Recording:
    """An executor that runs nothing and answers rightly."""

    asynchronous = False

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def submit(self, step: Step) -> Any:
        self.steps.append(step)
        samples = (*step.decodes, *(chunk.sequence for chunk in step.chunks if chunk.sample))
        result = StepResult(step=step.id, tokens=((0,) * len(samples),))
        return SimpleNamespace(done=lambda: True, result=lambda: result)

    def check(self) -> Health:
        return Health(ok=True)


def test_full_step_has_all_tokens_when_all_layers_keep_a_state() -> None:
    sizes = dict.fromkeys(("num_blocks", "weights_bytes", "activation_bytes", "kv_bytes", "budget_bytes"), 0)
    cache = CacheInfo(block_size=16, kinds=(), states=2, device="", dtype="float32", **sizes)
    executor: Any = Recording()
    limits = {"max_tokens": 40, "max_len": 24, "max_running": 4, "vocab_size": 9}
    rehearse(executor, cache, owner="executor 'mine'", not_built_in="", full=True, **limits)
    assert [chunk.count for chunk in executor.steps[-2].chunks] == [24, 16]


@pytest.mark.parametrize(
    ("max_len", "max_running", "short"),
    [(24, 4, [24]), (500, 6, [32, 128, 500]), (700, 6, [32, 128, 512]), (700, 4, [32]), (700, 3, [])],
)
def test_short_prompts_precede_the_full_step(max_len: int, max_running: int, short: list[int]) -> None:
    sizes = dict.fromkeys(("weights_bytes", "activation_bytes", "kv_bytes", "budget_bytes"), 0)
    cache = CacheInfo(num_blocks=100, block_size=16, kinds=(FULL,), device="", dtype="float32", **sizes)
    executor: Any = Recording()
    limits = {"max_tokens": 2 * max_len, "max_len": max_len, "max_running": max_running, "vocab_size": 9}
    rehearse(executor, cache, owner="executor 'mine'", not_built_in="", full=True, **limits)
    *_, full, end = executor.steps
    first = full.chunks[0].sequence
    before = executor.steps[-2 - len(short) : -2]
    assert [(chunk.sequence, chunk.count) for step in before for chunk in step.chunks] == list(enumerate(short, 1))
    assert first == 1 + len(short)
    assert (end.chunks, end.finished) == ((), (*range(first), *(one.sequence for one in full.new)))


def test_start_fails_with_the_error_of_the_rehearsal(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shut = []
    shutdown = UniprocExecutor.shutdown
    monkeypatch.setattr(UniprocExecutor, "shutdown", lambda self: shut.append(self) or shutdown(self))
    monkeypatch.setattr(StepLauncher, "_launch_kernels", lambda *_: 1 / 0)
    with pytest.raises(Exception, match="step 0 failed on cpu: ZeroDivisionError: division by zero"):
        make_engine()
    assert len(shut) == 1


def test_start_refuses_what_is_no_cache_info(make_engine: Any) -> None:
    class Unfinished(UniprocExecutor):
        def start(self) -> Any:
            super().start()

    expected = r"^executor '.*Unfinished' passed in from Python returned None from start\(\), not a CacheInfo"
    with pytest.raises(PluginError, match=expected):
        make_engine(executor=Unfinished)


LATE = """
from engine.core.hooks import hookimpl

@hookimpl
def register_attention(register):
    register("late", load, api="1", summary="")

def load():
    from engine.plugins.attention.torch import TorchAttention

    class Late(TorchAttention):
        def forward(self, layer, q, k, v, plan):
            raise KeyError("tide")

    return Late
"""


@pytest.mark.parametrize(("executor", "ranks"), [("multiproc", 1), ("tp", 2)])
def test_a_worker_names_the_plugin_before_the_engine_is_there(
    make_engine: Any,
    install: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: Any,
    caplog: Any,
    executor: str,
    ranks: int,
) -> None:
    install("engine-late", "0.4", LATE, entry="late")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    expected = (
        r"failed in step 0: attention 'late' of engine-late 0.4 failed in forward\(\) of layer 0: KeyError: 'tide' "
        r"\(engine_late_module.py, line 13\)$"
    )
    with pytest.raises(ExecutorError, match=expected):
        make_engine(attention="late", executor=executor, executor__tensor_parallel=ranks)
    tracebacks = [one for one in caplog.records if "Traceback" in one.getMessage()]
    assert 1 <= len(tracebacks) <= ranks
    assert 'raise KeyError("tide")' in tracebacks[0].getMessage()


def test_auto_passes_over_what_a_worker_cannot_construct(
    engine_checkpoint: Any, install: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LATE.replace('summary=""', 'summary="", preference=99')
    source = source.replace("forward(self, layer, q, k, v, plan)", "__init__(*_)")
    install("engine-late", "0.4", source, entry="late")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    settings = {"cache__memory": "8MiB", "executor__device": "cpu", "plugins__prefer": ("engine-late",)}
    with Engine(str(engine_checkpoint), executor="multiproc", **settings) as engine:
        [choice] = [one for one in engine.parts.choices if one.extension_point == "attention"]
        assert choice.name != "late"
        assert "attention 'late' of engine-late 0.4 failed in its constructor: KeyError: 'tide'" in choice.reason
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].token_ids


def test_start_refuses_weights_whose_logits_are_not_finite(make_engine: Any) -> None:
    class Overflowing(TorchAttention):
        def forward(self, layer: int, q: Any, k: Any, v: Any, plan: Any) -> Any:
            return super().forward(layer, q, k, v, plan) * float("nan")

    end = "try bfloat16 or float32; not built in: attention '.*Overflowing' passed in from Python$"
    with pytest.raises(CheckpointError, match=rf"the logits of the rehearsal's prompt are not finite .*{end}"):
        make_engine(attention=Overflowing)
