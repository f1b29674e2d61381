"""Profiles by layer of steps that replay CUDA graphs, on a CPU whose events are read as those of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from engine.core import Engine, Request
from engine.core.profiling.layer_events import BREAK
from engine.core.runner import graph_capture, layer_profile, start_graphs
from engine.testing.checkpoints import make_checkpoint

from .replays import ReplayByRunning
from .test_cuda_graphs import FixedAttention
from .test_layer_profile import PARAMS, TINY, finish, load, profile


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


REPLAY_MARK = "a replay"
OPERATOR_MARK = "operator "
"""Begins the annotation, in a replay, of an operator that is not run again; its name follows."""


def on_device(events: list[Any]) -> list[Any]:
    """The events of a CPU's profile as those of a GPU would be: operators are kernels, and those of a replay have one
    launch, in which the host sees nothing."""
    spans = [one for one in events if one.get("cat") in ("cpu_op", "user_annotation")]
    replays = [one for one in spans if one["name"] == REPLAY_MARK]
    found, busy_until = [], 0.0
    for number, one in enumerate(sorted(spans, key=lambda one: (one["ts"], -one["dur"]))):
        begin, end, name = one["ts"], one["ts"] + one["dur"], one["name"]
        around = [replay for replay in replays if replay["ts"] <= begin and end <= replay["ts"] + replay["dur"]]
        correlation = {"correlation": int(around[0]["ts"] * 1000) if around else -number}
        if name == REPLAY_MARK:
            found.append({**one, "cat": "cuda_runtime", "name": "cudaGraphLaunch", "args": correlation})
        elif one["cat"] == "user_annotation" and not name.startswith(OPERATOR_MARK):
            found += [] if around else [one]
        elif begin >= busy_until:
            busy_until = end
            if not around:
                found.append({**one, "cat": "cuda_runtime", "dur": 0.001, "args": correlation})
            kernel = {**one, "cat": "kernel", "name": name.removeprefix(OPERATOR_MARK), "tid": "device"}
            found.append(kernel | {"args": correlation})
    return found


class MarkedReplays(ReplayByRunning):
    """Marks each replay. What is captured in segments is not run again: replays mark its operators."""

    def capture(
        self, work: Callable[[], Any], warm_up: Callable[[], object] | None = None
    ) -> tuple[Callable[[], None], Any]:
        replay, made = super().capture(work, warm_up)

        def marked() -> None:
            with torch.profiler.record_function(REPLAY_MARK):
                replay()

        return marked, made

    def capture_segments(
        self, work: Callable[[Callable[[], None]], Any], warm_up: Callable[[], object] | None = None
    ) -> tuple[list[Callable[[], None]], Any]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            made = work(layer_profile._mark_break)
        made.zero_()  # computed from attention's outputs, which nothing has written during the capture
        segments: list[list[str]] = [[]]
        for event in on_device(layer_profile._events(recorded)):
            if event["name"] == BREAK:
                segments.append([])
            elif event["cat"] == "kernel":
                segments[-1].append(event["name"])

        def replay(names: list[str]) -> None:
            with torch.profiler.record_function(REPLAY_MARK):
                for name in names:
                    with torch.profiler.record_function(f"{OPERATOR_MARK}{name}"):
                        pass

        return [partial(replay, names) for names in segments], made


@pytest.fixture
def marked_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on a CPU, whose profile is read as a GPU's."""
    monkeypatch.setattr(graph_capture, "GraphCapturer", MarkedReplays)
    monkeypatch.setattr(start_graphs, "use_graphs", lambda *_: True)
    attribute = layer_profile.attribute

    def as_on_a_gpu(events: list[Any], **arguments: Any) -> Any:
        return attribute(on_device(events), **{**arguments, "device": "cuda"})

    monkeypatch.setattr(layer_profile, "attribute", as_on_a_gpu)


def test_replays_of_decode_steps_are_matched_with_the_same_steps_without_graphs(
    checkpoint: Path, marked_replays: None
) -> None:
    settings = TINY | {"executor__graphs": "decode", "scheduler__max_running": 4}
    with Engine(model=str(checkpoint), attention=FixedAttention, **settings) as made:
        load(made)
        made.step()
        [rank] = profile(made)
        finish(made)
    assert rank.graphs == (("decode 3, greedy", 5),)
    rows = {row.name: row for row in rank.rows}
    assert sum(row.device_us for row in rank.rows) + rank.idle_us == pytest.approx(rank.step_us)
    assert rows["(graph replay)"].calls == 1
    layers = [row for name, row in rows.items() if name.startswith("model.layers.1.")]
    assert len(layers) == 8
    assert all(row.calls == 1 and row.device_us > 0 and row.cpu_us == 0 for row in layers)
    assert rows["lm_head"].device_us > 0
    assert "(copies in graphs)" not in rows


def test_piecewise_replays_are_matched_with_attention_between_them(checkpoint: Path, marked_replays: None) -> None:
    settings = TINY | {"executor__graphs": "on", "scheduler__max_running": 4, "scheduler__max_batch_tokens": 64}
    with Engine(model=str(checkpoint), attention=FixedAttention, **settings) as made:
        for number in range(16):
            tokens = tuple(range(number, number + 40))
            made.add(Request(id=f"r{number}", prompt=tokens, params=attrs.evolve(PARAMS, max_tokens=1)))
        made.step()
        [rank] = profile(made)
        finish(made)
    assert rank.graphs == (("64 tokens", 5),)
    assert (rank.decodes, rank.prefill_tokens) == ((0,), (64,))
    rows = {row.name: row for row in rank.rows}
    assert sum(row.device_us for row in rank.rows) + rank.idle_us == pytest.approx(rank.step_us)
    assert rows["(graph replay)"].calls == 3  # before, between and after the attention of two layers
    attention = rows["model.layers.1.self_attn.attention"]
    assert attention.calls == 1
    assert attention.cpu_us > 0, "attention is launched between the replays"
    assert attention.kernels > rows["model.layers.1.self_attn.o_proj"].kernels == 1
    assert rows["model.layers.1.mlp.down_proj"].calls == 1
    assert rows["model.layers.1.mlp.down_proj"].cpu_us == 0
