"""Profiles by layer of whole engines: times sum to the step, counts equal those by hand, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.core import Engine, Request, SamplingParams
from engine.core.errors import ControlError
from engine.core.profiling import RankLayers
from engine.core.runner import layer_profile, start
from engine.core.timeline import TraceOptions
from engine.testing.checkpoints import make_checkpoint

from .test_cuda_graphs import FixedAttention, ReplayByRunning

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


def state_of(instance: object, seen: dict[int, Any]) -> dict[int, Any]:
    """The class and the identity of each attribute of an object and of all that it refers to in the engine."""
    if id(instance) in seen or isinstance(instance, (type, torch.Tensor)):
        return seen
    seen[id(instance)] = type(instance), None
    if isinstance(instance, (list, tuple, dict)):
        parts = dict(enumerate(instance.values() if isinstance(instance, dict) else instance))
    elif type(instance).__module__.startswith("engine."):
        names = [*getattr(instance, "__dict__", ())]
        names += [name for cls in type(instance).__mro__ for name in cls.__dict__.get("__slots__", ())]
        parts = {name: getattr(instance, name) for name in names if hasattr(instance, name)}
    else:
        return seen
    seen[id(instance)] = type(instance), {name: id(part) for name, part in parts.items()}
    for part in parts.values():
        state_of(part, seen)
    return seen


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
    before, model = state_of(launcher.state, {}), state_of(launcher.state.model, {})
    load(engine, count=1)
    engine.call("start_layers")
    during = state_of(launcher.state, {})
    changed = [one for one in before.keys() & during.keys() if before[one][0] is not during[one][0]]
    assert len(changed) > 20, "the modules are annotated while the profile runs"
    engine.step()
    engine.call("stop_layers", {"discard": True})
    after = state_of(launcher.state, {})
    assert all(before[one][0] is after[one][0] for one in before.keys() & after.keys())
    assert state_of(launcher.state.model, {}) == model
    assert launcher._observer is None
    finish(engine)


def test_traces_and_profiles_by_layer_exclude_each_other(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="not profiled; start that first"):
        engine.call("stop_layers")
    load(engine, count=1)
    engine.call("start_layers")
    with pytest.raises(ControlError, match="profiled already"):
        engine.call("start_layers")
    with pytest.raises(ControlError, match=r"the layers are profiled, which has torch\.profiler to itself"):
        engine.start_trace(TraceOptions(path=str(tmp_path / "a.json.gz")))
    for _ in range(5):
        engine.step()
    [rank] = engine.call("stop_layers")
    assert rank["steps"] == 2
    engine.start_trace(TraceOptions(path=str(tmp_path / "b.json.gz"), activities=()))
    with pytest.raises(ControlError, match="a trace is recorded"):
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


def on_device(events: list[Any]) -> list[Any]:
    """The events of a CPU's profile as those of a GPU would be: operators are kernels, and those of a replay have one
    launch, in which the host sees nothing."""
    spans = [one for one in events if one.get("cat") in ("cpu_op", "user_annotation")]
    replays = [one for one in spans if one["name"] == REPLAY_MARK]
    found, busy_until = [], 0.0
    for number, one in enumerate(sorted(spans, key=lambda one: (one["ts"], -one["dur"]))):
        begin, end = one["ts"], one["ts"] + one["dur"]
        around = [replay for replay in replays if replay["ts"] <= begin and end <= replay["ts"] + replay["dur"]]
        if one["name"] == REPLAY_MARK:
            launch = {
                **one,
                "cat": "cuda_runtime",
                "name": "cudaGraphLaunch",
                "args": {"correlation": int(begin * 1000)},
            }
            found.append(launch)
        elif one["cat"] == "user_annotation":
            found += [] if around else [one]
        elif begin >= busy_until:
            busy_until, correlation = end, int(around[0]["ts"] * 1000) if around else -number
            if not around:
                found.append({**one, "cat": "cuda_runtime", "dur": 0.001, "args": {"correlation": correlation}})
            found.append({**one, "cat": "kernel", "tid": "device", "args": {"correlation": correlation}})
    return found


REPLAY_MARK = "a replay"


class AnnotatedReplay(ReplayByRunning):
    """Marks each replay."""

    def capture(
        self, work: Callable[[], Any], warm_up: Callable[[], object] | None = None
    ) -> tuple[Callable[[], None], Any]:
        replay, made = super().capture(work, warm_up)

        def marked() -> None:
            with torch.profiler.record_function(REPLAY_MARK):
                replay()

        return marked, made


def test_replays_of_decode_steps_are_those_of_their_twins(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "GraphCapturer", AnnotatedReplay)
    monkeypatch.setattr(start, "use_graphs", lambda *_: True)
    attribute = layer_profile.attribute
    seen: list[str] = []

    def as_on_a_gpu(events: list[Any], *, graphs: dict[int, str], first: int, device: str) -> Any:
        seen.extend(graphs.values())
        return attribute(on_device(events), graphs=graphs, first=first, device="cuda")

    monkeypatch.setattr(layer_profile, "attribute", as_on_a_gpu)
    settings = TINY | {"executor__graphs": "decode", "scheduler__max_running": 4}
    with Engine(model=str(checkpoint), attention=FixedAttention, **settings) as made:
        load(made)
        made.step()
        [rank] = profile(made)
        finish(made)
    assert set(seen) == {"decode 3, greedy"}
    rows = {row.name: row for row in rank.rows}
    assert sum(row.device_us for row in rank.rows) + rank.idle_us == pytest.approx(rank.step_us)
    assert rows["(graph replay)"].calls == 1
    layers = [row for name, row in rows.items() if name.startswith("model.layers.1.")]
    assert len(layers) == 8
    assert all(row.calls == 1 and row.device_us > 0 and row.cpu_us == 0 for row in layers)
    assert rows["lm_head"].device_us > 0
    assert "(copies in graphs)" not in rows


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_device_times_are_those_of_the_step_on_a_gpu(engine_checkpoint: Path, graphs: str) -> None:
    settings = {"executor__device": "cuda", "cache__memory": "256MiB", "model__max_len": 1024}
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
