"""MTP heads among a model's weights: every proposal is that of a reference, and no token of the output changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.core.errors import CheckpointError, PluginError
from engine.core.speculators import SpeculatorSpec
from engine.plugins.speculators.mtp import MTP
from engine.testing.checkpoints import make_checkpoint

from .heads_in_engine import GREEDY, PROMPTS, Received, build, check, check_whole_runs, drawn, run
from .mtp_reference import NAME, Reference, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    path = tmp_path_factory.mktemp("model")
    return path, Reference(path, write_model(path))


@pytest.fixture(scope="module")
def expected(model: tuple[Path, Reference]) -> list[tuple[int, ...]]:
    """Outputs without a speculator."""
    with build(model[0], "") as engine:
        return [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]


def test_the_model_without_a_speculator_is_qwen2(
    model: tuple[Path, Reference], expected: list[tuple[int, ...]]
) -> None:
    with build(model[0] / "qwen2", "") as engine:
        assert [done.token_ids for done in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculator__max_drafts": 1, "scheduler__overlap": "on"},
        {"scheduler__max_batch_tokens": 11},
        {"cache__block_size": 4, "speculator__max_drafts": 6},
    ],
    ids=["plain", "one draft", "chunks", "small blocks"],
)
def test_proposals_are_the_reference_s(
    model: tuple[Path, Reference], expected: list[tuple[int, ...]], received: Received, settings: dict[str, Any]
) -> None:
    path, reference = model
    with build(path, "mtp", **settings) as engine:
        check_whole_runs(engine, reference.propose, received, expected)


def test_two_ranks_propose_the_same(
    model: tuple[Path, Reference], expected: list[tuple[int, ...]], received: Received
) -> None:
    path, reference = model
    with build(path, "mtp", executor__tensor_parallel=2) as engine:
        assert run(engine, expected) == expected
    check(reference.propose, received, expected)


def test_tokens_drawn_with_a_seed_are_those_without_drafts(model: tuple[Path, Reference]) -> None:
    with build(model[0], "") as engine:
        alone = drawn(engine)
    with build(model[0], "mtp") as engine:
        assert drawn(engine) == alone
        stats = engine.stats().speculation
        assert stats is not None
        assert sum(stats.verified) > 20


def test_auto_takes_the_heads_of_a_model_that_has_some(model: tuple[Path, Reference]) -> None:
    with build(model[0], "auto") as engine:
        assert engine.parts.drafter is not None
        assert issubclass(engine.parts.drafter.speculator, MTP)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 0}, r"has no num_nextn_predict_layers, so the model has no MTP heads"),
        ({"num_nextn_predict_layers": ...}, r"has no num_nextn_predict_layers, so the model has no MTP heads"),
        ({"num_nextn_predict_layers": 2}, r"num_nextn_predict_layers: 2, and MTP heads have one layer"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            r"reads the MTP heads of MiMoForCausalLM, and this model is Qwen2ForCausalLM; use another speculator",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, "layer_types": ...},
            r"use_sliding_window: true, and MTP heads are computed with full attention",
        ),
    ],
)
def test_engine_refuses_heads_that_are_not_computed(
    model: tuple[Path, Reference], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    copy_model(model[0], tmp_path, **changes)
    with pytest.raises(PluginError, match=message):
        build(tmp_path, "mtp")


def test_engine_refuses_a_checkpoint_of_the_speculator_s_own(model: tuple[Path, Reference]) -> None:
    with pytest.raises(
        PluginError, match=r"among the model's own weights, but speculator.model .* is set; leave it out"
    ):
        build(model[0], "mtp", model[0])


@pytest.mark.parametrize("name", ["input_proj.weight", "self_attn.q_proj.bias", "final_layernorm.weight"])
def test_engine_refuses_a_model_that_lacks_a_tensor_of_its_heads(
    model: tuple[Path, Reference], tmp_path: Path, name: str
) -> None:
    copy_model(model[0], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{NAME}.{name}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensor\(s\) that the model needs: {NAME}.{name}"):
        build(tmp_path, "mtp")


def test_engine_refuses_heads_of_another_shape_or_with_more_tensors(
    model: tuple[Path, Reference], tmp_path: Path
) -> None:
    copy_model(model[0], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    projection = tensors[f"{NAME}.input_proj.weight"]
    save_file({**tensors, f"{NAME}.input_proj.weight": projection[:, :64].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"input_proj.weight .* has shape \[64, 64\]; .* expects \[64, 128\]"):
        build(tmp_path, "mtp")
    save_file({**tensors, f"{NAME}.gate.weight": projection.clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"does not know: {NAME}.gate.weight"):
        build(tmp_path, "mtp")


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=True)
    with pytest.raises(PluginError, match=r"has no num_nextn_predict_layers, so the model has no MTP heads"):
        build(path, "mtp")
    spec = SpeculatorSpec(vocab_size=8, max_len=8, max_drafts=1)
    assert MTP.refuses(spec) == "it needs the config.json of the model"


def copy_model(model: Path, directory: Path, **changes: Any) -> None:
    """Copy a model with changes of its config.json; a key whose value is ... is left out."""
    for file in model.iterdir():
        if file.is_file():
            (directory / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((model / "config.json").read_text()), **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
