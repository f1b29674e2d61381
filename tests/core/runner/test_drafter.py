"""A speculator on the device between replays of decode steps: by the stand-in on the CPU, by CUDA graphs on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.core import Engine, SamplingParams
from engine.core.runner.drafter import Drafter
from engine.core.types import SpeculationStats
from engine.testing.checkpoints import make_checkpoint
from tests.core.runner.replays import ReplayByRunning
from tests.core.runner.test_cuda_graphs import (
    GREEDY,
    FixedAttention,
    build,
    tokens_of,
)
from tests.plugins.speculators import eagle3_reference, eagle_reference, mtp_reference
from tests.plugins.speculators.heads_in_engine import note_proposals


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", tokenizer=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[int, ...]]:
    with build(checkpoint, executor__graphs="off") as engine:
        return tokens_of(engine)


def drafting(draft: Path, **settings: Any) -> dict[str, Any]:
    return {"speculator": "draft_model", "speculator__model": str(draft), "speculator__length": "fixed", **settings}


HEADS = ("eagle3", "eagle", "mtp")


def with_heads(directory: Path, speculator: str) -> tuple[Path, dict[str, Any]]:
    """Write a model and its heads; return its directory and the settings."""
    target, heads = directory / "target", directory / "heads"
    if speculator == "mtp":
        target.mkdir()
        mtp_reference.write_model(target)
        return target, {"speculator": "mtp", "speculator__length": "fixed"}
    make_checkpoint(target, "llama", tokenizer=True, num_hidden_layers=8)
    (eagle3_reference if speculator == "eagle3" else eagle_reference).write_heads(heads)
    return target, drafting(heads, speculator=speculator)


def speculation(engine: Engine) -> SpeculationStats:
    stats = engine.stats().speculation
    assert stats is not None
    return stats


@pytest.mark.parametrize("running", [3, 16], ids=["most are too large", "all fit"])
@pytest.mark.parametrize("scheduler", ["fcfs", "multi_step"])
@pytest.mark.parametrize("captured", [True, False], ids=["drafter in graphs", "drafter without graphs"])
def test_drafts_of_the_model_itself_are_all_accepted_between_replays(
    checkpoint: Path,
    replays: type[ReplayByRunning],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    running: int,
    scheduler: str,
    captured: bool,
) -> None:
    if not captured:
        monkeypatch.setattr(Drafter, "no_graphs", "cannot be captured")
    settings = drafting(checkpoint, running=running, scheduler=scheduler)
    with build(checkpoint, attention=FixedAttention, **settings) as engine:
        launcher = engine._executor._runner._launcher  # type: ignore[attr-defined]
        assert (launcher.state.drafter._graphs is not None) == captured
        assert tokens_of(engine) == expected
        stats = speculation(engine)
        assert sum(stats.accepted) > 50
        assert stats.accepted == stats.verified
    assert replays.captured > 0


def test_drafts_of_another_model_change_no_token_between_replays(
    checkpoint: Path, replays: type[ReplayByRunning], expected: list[tuple[int, ...]], tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path, "llama", tokenizer=True, seed=4)
    drawn = SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True, seed=3, logprobs=1)
    with build(checkpoint, attention=FixedAttention) as engine:
        alone = tokens_of(engine, drawn)
    with build(checkpoint, attention=FixedAttention, **drafting(other, running=16)) as engine:
        assert tokens_of(engine) == expected
        assert tokens_of(engine, drawn) == alone
        assert sum(speculation(engine).verified) > 50


@pytest.mark.parametrize("speculator", HEADS)
def test_hidden_states_of_replays_are_those_of_plain_steps(
    replays: type[ReplayByRunning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculator: str
) -> None:
    """Heads then propose the same tokens."""
    target, settings = with_heads(tmp_path, speculator)
    found = note_proposals(monkeypatch)
    outputs, proposals = [], []
    for graphs in ("decode", "off"):
        with build(target, attention=FixedAttention, running=16, executor__graphs=graphs, **settings) as engine:
            outputs.append(tokens_of(engine, GREEDY))
        proposals.append(sorted((length, tuple(tokens)) for _, length, tokens in found))
        found.clear()
    assert outputs[0] == outputs[1]
    assert proposals[0] == proposals[1]
    assert sum(len(tokens) for _, tokens in proposals[0]) > 100


@pytest.mark.gpu
@pytest.mark.parametrize("on", ["on", "decode", "off"])
@pytest.mark.parametrize("attention", ["triton", "torch"])
@pytest.mark.parametrize("running", [4, 16])
def test_drafts_of_the_model_itself_change_no_token_on_a_gpu(
    checkpoint: Path, attention: str, on: str, running: int
) -> None:
    """In float32 sums of another order may change a token now and then, of the target or of a draft."""
    on = "off" if attention == "torch" else on
    usual = {"executor__device": "cuda", "executor__graphs": on, "attention": attention, "model__dtype": "float32"}
    with build(checkpoint, running=running, **usual) as engine:
        alone = tokens_of(engine)
    with build(checkpoint, **drafting(checkpoint, running=running), **usual) as engine:
        assert tokens_of(engine) == alone
        stats = speculation(engine)
        assert sum(stats.verified) > 100
        assert sum(stats.accepted) > 0.95 * sum(stats.verified)


@pytest.mark.gpu
@pytest.mark.parametrize("on", ["on", "decode", "off"])
@pytest.mark.parametrize("speculator", HEADS)
def test_heads_on_a_gpu_change_no_token(tmp_path: Path, on: str, speculator: str) -> None:
    target, settings = with_heads(tmp_path, speculator)
    usual = {"executor__device": "cuda", "executor__graphs": on, "attention": "triton", "model__dtype": "float32"}
    with build(target, running=16, **usual) as engine:
        alone = tokens_of(engine)
    with build(target, running=16, **settings, **usual) as engine:
        assert tokens_of(engine) == alone
        assert sum(speculation(engine).verified) > 100
