"""Profiles by layer of whole engines: times sum to the step, counts equal those by hand, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.core import Engine, Request, SamplingParams
from engine.core.errors import ControlError
from engine.core.profiling import RankLayers
from engine.core.runner import layer_profile
from engine.core.timeline import TraceOptions
from engine.testing.checkpoints import make_checkpoint

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
TINY = {"executor__device": "cpu", "executor__threads": 1, "cache__memory": "8MiB", "model__max_len": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(model=str(checkpoint), **TINY) as made:
        yield made


def load(engine: Engine, count: int = 3, prompt: int = 20) -> None:
    for number in range(count):
        tokens = tuple(range(number, number + prompt))
        engine.add(Request(id=f"r{number}", prompt=tokens, params=PARAMS))


def finish(engine: Engine) -> dict[str, list[int]]:
    """The tokens of all requests that come from now on."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request, []).extend(output.tokens)
    return tokens


def profile(engine: Engine, steps: int = 5) -> list[RankLayers]:
    engine.call("start_layers", {"skip": 1})
    for _ in range(1 + steps + 1):
        engine.step()
    return [msgspec.convert(answer, RankLayers) for answer in engine.call("stop_layers")]


Seen = dict[int, tuple[object, type, dict[Any, int]]]
"""By id: an object, kept so that no other gets its id, its class, and the ids of its attributes."""


def state_of(instance: object, seen: Seen) -> Seen:
    """The class and the attributes of an object, and of all that it refers to in the engine."""
    if id(instance) in seen or isinstance(instance, (type, torch.Tensor)):
        return seen
    parts: dict[Any, object] = {}
    if isinstance(instance, (list, tuple, dict)):
        parts = dict(enumerate(instance.values() if isinstance(instance, dict) else instance))
    elif type(instance).__module__.startswith("engine."):
        names = [*getattr(instance, "__dict__", ())]
        names += [name for cls in type(instance).__mro__ for name in cls.__dict__.get("__slots__", ())]
        parts = {name: getattr(instance, name) for name in names if hasattr(instance, name)}
    seen[id(instance)] = instance, type(instance), {name: id(part) for name, part in parts.items()}
    for part in parts.values():
        state_of(part, seen)
    return seen


def classes_of(state: Seen) -> dict[int, type]:
    return {one: cls for one, (_, cls, _) in state.items()}


def test_times_sum_to_the_step_and_tokens_stay(engine: Engine) -> None:
    load(engine)
    expected = finish(engine)
    load(engine)
    for _ in range(2):
        engine.step()
    [rank] = profile(engine)
    assert rank.steps == 5
    assert (rank.decodes, rank.prefill_tokens, rank.device) == ((3,), (0,), "cpu")
    assert sum(row.device_us for row in rank.rows) + rank.idle_us == pytest.approx(rank.step_us)
    assert rank.num_rows == len(rank.rows)
    rows = {row.name: row for row in rank.rows}
    assert all(rows[name].calls == 1 for name in rows if name.startswith("model.layers."))
    assert all(row.device_us > 0 and row.cpu_us > 0 for row in rank.rows if row.kind)
    assert {"(batch)", "(sampling)", "(model)", "(rotary embedding)"} <= rows.keys()
    remaining = finish(engine)
    assert all(tokens == expected[name][-len(tokens) :] for name, tokens in remaining.items())


@pytest.mark.parametrize("readable", [True, False])
def test_the_events_are_read_before_the_profiler_starts_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    # A second session would change the clock by which kineto converts the first one's times.
    order: list[str] = []
    read, run_twins = layer_profile._events, layer_profile.LayerProfile._run_twins

    def events(recorded: Any) -> Any:
        order.append("read")
        if not readable:
            raise ControlError("the events of the profiler cannot be read")
        return read(recorded)

    def twins(self: layer_profile.LayerProfile) -> Any:
        order.append("twins")
        return run_twins(self)

    monkeypatch.setattr(layer_profile, "_events", events)
    monkeypatch.setattr(layer_profile.LayerProfile, "_run_twins", twins)
    load(engine)
    if readable:
        profile(engine)
    else:
        with pytest.raises(ControlError, match="cannot be read"):
            profile(engine)
    finish(engine)
    assert order == ["read", "twins"], "the twins run on every rank, whatever becomes of the events"


def test_bytes_and_flops_equal_a_count_by_hand_of_three_layers(engine: Engine) -> None:
    load(engine, prompt=20)
    engine.step()  # the prompts
    [rank] = profile(engine, steps=5)
    finish(engine)
    rows = {row.name: row for row in rank.rows}
    # float32; 3 sequences; hidden size 64, 4 query heads and 2 KV heads of 16, intermediate size 96, 512 tokens.
    down = rows["model.layers.1.mlp.down_proj"]
    assert (down.flops, down.bytes) == (2 * 3 * 96 * 64, 4 * (96 * 64 + 3 * (96 + 64)))
    head = rows["lm_head"]
    assert (head.flops, head.bytes) == (2 * 3 * 64 * 512, 4 * (64 * 512 + 3 * 64))
    contexts = 3 * (22 + 23 + 24 + 25 + 26) / 5  # the first step is skipped, in which they have 21
    attention = rows["model.layers.0.self_attn.attention"]
    assert attention.flops == pytest.approx(4 * 4 * 16 * contexts)
    cache = 2 * 2 * 16 * (contexts + 3)  # keys and values: read, and written for 3 tokens
    assert attention.bytes == pytest.approx(4 * (cache + 3 * (64 + 32 + 32 + 64)))


def test_nothing_of_the_model_differs_after_a_profile(engine: Engine) -> None:
    executor: Any = engine._executor
    launcher = executor._runner._launcher
    state, model = state_of(launcher.state, {}), state_of(launcher.state.model, {})
    before = classes_of(state)
    load(engine, count=1)
    engine.call("start_layers")
    during = classes_of(state_of(launcher.state, {}))
    changed = [one for one in before.keys() & during.keys() if before[one] is not during[one]]
    assert len(changed) > 20, "the modules are annotated while the profile runs"
    engine.step()
    engine.call("stop_layers", {"discard": True})
    after = classes_of(state_of(launcher.state, {}))
    assert [one for one in before.keys() & after.keys() if before[one] is not after[one]] == []
    assert state_of(launcher.state.model, {}).keys() == model.keys()
    assert all(model[one][2] == parts for one, (_, _, parts) in state_of(launcher.state.model, {}).items())
    assert launcher._observer is None
    finish(engine)


def test_traces_and_profiles_by_layer_exclude_each_other(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="no profile by layer is in progress; start one first"):
        engine.call("stop_layers")
    load(engine, count=1)
    engine.call("start_layers")
    with pytest.raises(ControlError, match="in progress already"):
        engine.call("start_layers")
    with pytest.raises(ControlError, match=r"a profile by layer uses torch\.profiler now"):
        engine.start_trace(TraceOptions(path=str(tmp_path / "a.json.gz")))
    for _ in range(5):
        engine.step()
    [rank] = engine.call("stop_layers")
    assert rank["steps"] == 2
    engine.start_trace(TraceOptions(path=str(tmp_path / "b.json.gz"), activities=()))
    with pytest.raises(ControlError, match=r"a trace uses torch\.profiler now"):
        engine.call("start_layers")
    finish(engine)
    engine.stop_trace()


def test_too_few_steps_are_refused_and_a_later_profile_works(engine: Engine) -> None:
    load(engine, count=1)
    engine.call("start_layers")
    engine.step()
    with pytest.raises(ControlError, match="fewer than two steps were recorded"):
        engine.call("stop_layers")
    assert profile(engine)[0].steps == 5
    finish(engine)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_device_times_are_those_of_the_step_on_a_gpu(engine_checkpoint: Path, graphs: str) -> None:
    settings = {"executor__device": "cuda", "cache__memory": "256MiB"}
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    with Engine(model=str(engine_checkpoint), executor__graphs=graphs, **settings) as on_gpu:
        for number in range(8):
            on_gpu.add(Request(id=f"r{number}", prompt=tuple(range(number, number + 100)), params=params))
        for _ in range(10):
            on_gpu.step()
        on_gpu.call("start_layers", {"skip": 10})
        for _ in range(11):
            on_gpu.step()
        begin = time.perf_counter()
        for _ in range(200):
            on_gpu.step()
        step_us = (time.perf_counter() - begin) / 200 * 1e6
        [answer] = on_gpu.call("stop_layers")
    rank = msgspec.convert(answer, RankLayers)
    assert rank.steps == 200
    assert bool(rank.graphs[0][0]) == (graphs == "auto")
    assert sum(row.device_us for row in rank.rows) + rank.idle_us == pytest.approx(rank.step_us)
    assert rank.step_us == pytest.approx(step_us, rel=0.03)
    rows = {row.name: row for row in rank.rows}
    for layer in range(2):
        for name in ("self_attn.q_proj+k_proj+v_proj", "self_attn.attention", "self_attn.o_proj", "mlp.down_proj"):
            assert rows[f"model.layers.{layer}.{name}"].device_us > 0
            assert rows[f"model.layers.{layer}.{name}"].calls == 1
    assert "(copies in graphs)" not in rows
    assert "(outside of steps)" not in rows or rows["(outside of steps)"].device_us < 0.01 * step_us
