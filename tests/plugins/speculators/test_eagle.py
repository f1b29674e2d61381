"""EAGLE-1 heads in whole engines: every proposal is that of a reference, and no token of the output changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from engine.core.errors import CheckpointError, PluginError
from engine.core.speculators import SpeculatorSpec
from engine.plugins.speculators.draft_model import DraftModel
from engine.plugins.speculators.eagle import Eagle
from engine.testing.checkpoints import make_checkpoint

from .eagle3_reference import write_heads as write_eagle3
from .eagle_reference import Reference, write_heads
from .heads_in_engine import GREEDY, PROMPTS, Received, build, check, check_whole_runs, drawn, run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama", tokenizer=True)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[tuple[int, ...]]:
    """Outputs without a speculator."""
    with build(target, "") as engine:
        return [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    ("heads", "settings"),
    [
        ({"bias": False}, {}),
        ({"fc_bias": True, "bias": True}, {"speculator__max_drafts": 3, "scheduler__overlap": "on"}),
        ({"fc_bias": True}, {"scheduler__max_batch_tokens": 11}),
        ({"qkv_bias": True}, {"cache__block_size": 4, "speculator__max_drafts": 6}),
    ],
    ids=["plain", "bias of fc", "bias of fc that config.json does not name", "biases of queries, keys and values"],
)
def test_proposals_are_the_reference_s(
    target: Path,
    tmp_path: Path,
    expected: list[tuple[int, ...]],
    received: Received,
    heads: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    reference = Reference(target, write_heads(tmp_path, **heads))
    with build(target, "eagle", tmp_path, **settings) as engine:
        check_whole_runs(engine, reference.propose, received, expected)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [("qwen2", {}), ("llama", {"tie_word_embeddings": True})],
    ids=["qwen2", "tied head"],
)
def test_proposals_for_other_targets_are_the_reference_s(
    tmp_path: Path, received: Received, architecture: str, config: dict[str, Any]
) -> None:
    target = make_checkpoint(tmp_path / "target", architecture, tokenizer=True, **config)
    reference = Reference(target, write_heads(tmp_path / "heads"))
    with build(target, "") as engine:
        expected = run(engine)
    with build(target, "eagle", tmp_path / "heads") as engine:
        assert run(engine, expected) == expected
    check(reference.propose, received, expected)


def test_a_copy_of_the_model_s_embedding_is_not_read(
    target: Path, tmp_path: Path, expected: list[tuple[int, ...]], received: Received
) -> None:
    """Published heads have one."""
    tensors = write_heads(tmp_path)
    reference = Reference(target, tensors)
    save_file({**tensors, "embed_tokens.weight": reference.target.embedding.clone()}, tmp_path / "model.safetensors")
    with build(target, "eagle", tmp_path) as engine:
        assert run(engine) == expected
    check(reference.propose, received, expected)


def test_proposals_are_the_reference_s_after_a_preemption(
    target: Path, tmp_path: Path, expected: list[tuple[int, ...]], received: Received
) -> None:
    reference = Reference(target, write_heads(tmp_path))
    with build(target, "eagle", tmp_path) as engine:
        bytes_per_block = engine.cache_info.kv_bytes // engine.cache_info.num_blocks
    small: dict[str, Any] = {"model__max_len": 100, "cache__memory": str(8 * bytes_per_block)}
    with build(target, "eagle", tmp_path, **small) as engine:
        assert run(engine) == expected
        assert engine.stats().preemptions > 0
    check(reference.propose, received, expected)


def test_two_ranks_propose_the_same(
    target: Path, tmp_path: Path, expected: list[tuple[int, ...]], received: Received
) -> None:
    reference = Reference(target, write_heads(tmp_path, fc_bias=True, qkv_bias=True))
    with build(target, "eagle", tmp_path, executor__tensor_parallel=2) as engine:
        assert run(engine, expected) == expected
    check(reference.propose, received, expected)


def test_tokens_drawn_with_a_seed_are_those_without_drafts(target: Path, tmp_path: Path) -> None:
    write_heads(tmp_path)
    with build(target, "") as engine:
        alone = drawn(engine)
    with build(target, "eagle", tmp_path) as engine:
        assert drawn(engine) == alone
        stats = engine.stats().speculation
        assert stats is not None
        assert sum(stats.verified) > 20


def test_random_heads_change_no_token(target: Path, tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    """Those of --load-format dummy, whose files have no weights: also the model's weights are random."""
    write_heads(tmp_path, bias=True)
    dummy: dict[str, Any] = {"model__load_format": "dummy"}
    with build(target, "", **dummy) as engine:
        alone = run(engine)
    with build(target, "eagle", tmp_path, **dummy) as engine:
        assert run(engine) == alone


def test_auto_takes_the_heads_where_config_json_names_them(target: Path, tmp_path: Path) -> None:
    write_heads(tmp_path, architectures=["EagleLlamaForCausalLM"])
    with build(target, "auto", tmp_path) as engine:
        assert engine.parts.drafter is not None
        assert issubclass(engine.parts.drafter.speculator, Eagle)


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ({"hidden_size": 32, "head_dim": 16}, CheckpointError, r"for a hidden size of 32, and the model has one of 64"),
        ({"vocab_size": 511}, CheckpointError, r"for a vocabulary of 511, and the model has one of 512"),
        ({"hidden_size": ...}, CheckpointError, r"config.json lacks 'hidden_size'"),
        ({"hidden_act": "gelu"}, CheckpointError, r"hidden_act: 'gelu'; EAGLE heads are computed with silu"),
        (
            {"intermediate_size": 80},
            CheckpointError,
            r"gate_proj.weight .* has shape \[96, 64\]; .* expects \[80, 64\]",
        ),
        ({"bias": True}, CheckpointError, r"lacks 1 tensor\(s\) that the model needs: fc.bias"),
        ({"bias": "yes"}, CheckpointError, r"'bias' is 'yes'; it must be true or false"),
        ({"num_hidden_layers": 2}, PluginError, r"num_hidden_layers: 2; EAGLE heads have one; use heads of one layer"),
        ({"speculators_model_type": "eagle"}, PluginError, r"only EAGLE-3 heads are read in the form"),
    ],
)
def test_engine_refuses_heads_that_do_not_fit(
    target: Path, tmp_path: Path, heads: dict[str, Any], error: type[Exception], message: str
) -> None:
    write_heads(tmp_path, **heads)
    with pytest.raises(error, match=message):
        build(target, "eagle", tmp_path)


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.mlp.up_proj.weight"])
def test_engine_refuses_heads_that_lack_a_tensor(target: Path, tmp_path: Path, name: str) -> None:
    tensors = write_heads(tmp_path)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensor\(s\) that the model needs: {name}"):
        build(target, "eagle", tmp_path)


def test_engine_refuses_heads_with_a_tensor_that_is_not_computed(target: Path, tmp_path: Path) -> None:
    """As the norm of HASS."""
    tensors = write_heads(tmp_path)
    norm = tensors["layers.0.post_attention_layernorm.weight"].clone()
    save_file({**tensors, "embedding_layernorm.weight": norm}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not know: embedding_layernorm.weight"):
        build(target, "eagle", tmp_path)


def test_engine_refuses_heads_of_eagle_3_and_no_heads(target: Path, tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    with pytest.raises(PluginError, match=r"has EAGLE-3 heads; use the speculator eagle3"):
        build(target, "eagle", tmp_path)
    with pytest.raises(PluginError, match=r"it needs EAGLE heads; name their directory"):
        build(target, "eagle")


def test_a_draft_model_refuses_heads_that_config_json_names() -> None:
    spec = SpeculatorSpec(vocab_size=8, max_len=8, max_drafts=1, config={"architectures": ["EagleLlamaForCausalLM"]})
    assert "use the speculator eagle" in str(DraftModel.refuses(spec))
