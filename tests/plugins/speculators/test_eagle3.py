"""EAGLE-3 heads in whole engines: every proposal is that of a reference, and no token of the output changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.core.errors import CheckpointError, ConfigError, PluginError
from engine.core.layers import LayerFactory
from engine.core.speculators import TargetRows
from engine.plugins.speculators.eagle3 import Eagle3
from engine.testing.checkpoints import make_checkpoint

from . import heads_in_engine
from .eagle3_reference import LAYERS, Reference, write_heads
from .heads_in_engine import GREEDY, PROMPTS, Received, check, check_whole_runs, run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    return make_checkpoint(path, "llama", tokenizer=True, num_hidden_layers=8)


def build(target: Path, heads: Path | None, speculator: str = "eagle3", **settings: Any) -> Engine:
    return heads_in_engine.build(target, "" if heads is None else speculator, heads, **settings)


def propose(reference: Reference, layers: Sequence[int] = LAYERS) -> Callable[[Sequence[int], int], list[int]]:
    return lambda tokens, count: reference.propose(tokens, count, layers)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[tuple[int, ...]]:
    """Outputs without a speculator."""
    with build(target, None) as engine:
        return [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    ("heads", "settings"),
    [
        ({}, {}),
        ({"layout": "speculators"}, {"speculator__max_drafts": 3, "scheduler__overlap": "on"}),
        ({"norm_before_residual": True}, {"scheduler__max_batch_tokens": 11}),
        ({"own_embedding": True}, {"cache__block_size": 4, "speculator__max_drafts": 6}),
        ({"layer_ids": (1, 3, 6)}, {"speculator__max_drafts": 1}),
        ({"layer_ids": (0, 5, 5)}, {}),
        ({"layer_ids": (2, 4, 8)}, {}),
        ({"norm_before_fc": True, "norm_output": True, "layout": "speculators"}, {}),
        ({"fc_norm": True, "norm_output": True, "norm_before_residual": True}, {"scheduler__max_batch_tokens": 11}),
        ({"eagle_config": {"norm_before_fc": True}}, {}),
        ({"qk_norm": True, "layout": "speculators"}, {}),
        ({"window": 7}, {"cache__block_size": 4}),
    ],
    ids=[
        "eagle",
        "speculators",
        "chunks",
        "own embedding",
        "other layers",
        "a layer twice",
        "what leaves the last layer",
        "input normed as a whole",
        "input normed by layer",
        "normed as modelopt says",
        "queries and keys normed",
        "window",
    ],
)
def test_proposals_are_the_reference_s(
    target: Path,
    tmp_path: Path,
    expected: list[tuple[int, ...]],
    received: Received,
    heads: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    tensors = write_heads(tmp_path, **heads)
    read = {name: heads[name] for name in ("norm_before_residual", "norm_output", "window") if name in heads}
    reference = Reference(target, tensors, **read)
    layers = heads.get("layer_ids", LAYERS)
    with build(target, tmp_path, **settings) as engine:
        check_whole_runs(engine, propose(reference, layers), received, expected)


def test_proposals_are_the_reference_s_after_a_preemption(
    target: Path,
    tmp_path: Path,
    expected: list[tuple[int, ...]],
    received: Received,
) -> None:
    reference = Reference(target, write_heads(tmp_path))
    with build(target, tmp_path) as engine:
        bytes_per_block = engine.cache_info.kv_bytes // engine.cache_info.num_blocks
    with build(target, tmp_path, model__max_len=100, cache__memory=str(8 * bytes_per_block)) as engine:
        assert run(engine) == expected
        assert engine.stats().preemptions > 0
    check(propose(reference), received, expected)


def test_hidden_states_are_the_reference_s(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(target, write_heads(tmp_path))
    seen: list[torch.Tensor] = []
    observe = Eagle3.observe

    def noted(self: Eagle3, run: Any, target: TargetRows) -> torch.Tensor:
        seen.append(observe(self, run, target))
        return seen[-1]

    monkeypatch.setattr(Eagle3, "observe", noted)
    with build(target, tmp_path) as engine:
        seen.clear()
        prompt = PROMPTS[3]
        [done] = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    outputs = reference.outputs(reference.inputs(prompt), [*prompt[1:], *done.token_ids])
    assert (seen[0] - outputs).norm() / outputs.norm() < 1e-5


def test_two_ranks_propose_the_same(
    target: Path, tmp_path: Path, expected: list[tuple[int, ...]], received: Received
) -> None:
    reference = Reference(target, write_heads(tmp_path))
    with build(target, tmp_path, executor__tensor_parallel=2) as engine:
        assert run(engine, expected) == expected
    check(propose(reference), received, expected)


def test_auto_takes_the_heads_where_they_are_named(target: Path, tmp_path: Path) -> None:
    write_heads(tmp_path)
    with build(target, tmp_path, speculator="auto") as engine:
        assert engine.parts.drafter is not None
        assert issubclass(engine.parts.drafter.speculator, Eagle3)


def test_layers_named_by_their_outputs_are_those_before(
    target: Path, tmp_path: Path, expected: list[tuple[int, ...]], received: Received
) -> None:
    """As modelopt names them."""
    heads = write_heads(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]})
    with build(target, tmp_path) as engine:
        assert run(engine) == expected
    check(propose(Reference(target, heads), (1, 3, 6)), received, expected)


@pytest.mark.parametrize(
    ("heads", "error", "message"),
    [
        ({"layer_ids": (2, 4, 9)}, ConfigError, r"entering layers 2, 4, 9, and the model has 8 layers"),
        ({"fc_norm": True, "norm_before_fc": True}, CheckpointError, r"EAGLE-3 heads have one of them at most"),
        ({"norm_output": "yes"}, CheckpointError, r"'norm_output' is 'yes'; it must be true or false"),
        ({"draft_vocab_size": 600}, CheckpointError, r"have 600 draft tokens, and the model has 512 tokens"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, CheckpointError, r"must be a list of numbers of layers"),
    ],
)
def test_engine_refuses_heads_that_do_not_fit(
    target: Path, tmp_path: Path, heads: dict[str, Any], error: type[Exception], message: str
) -> None:
    write_heads(tmp_path, **heads)
    with pytest.raises(error, match=message):
        build(target, tmp_path)


def test_engine_refuses_a_model_that_gives_no_hidden_states(tmp_path: Path) -> None:
    """Whose blocks have one norm for attention and MLP in parallel."""
    path = make_checkpoint(
        tmp_path / "target", "cohere2", tokenizer=True, num_hidden_layers=8, layer_types=["full_attention"] * 8
    )
    write_heads(tmp_path / "heads")
    with pytest.raises(ConfigError, match=r"does not give the hidden states entering layers 2, 4, 5"):
        build(path, tmp_path / "heads")


def test_engine_refuses_a_model_without_a_final_norm_of_the_factory(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models of third parties may be."""

    def norm(self: LayerFactory, name: str, size: int, eps: float, kind: Any = "rms", *, num_layers: int) -> Any:
        return self.norm(name, size, eps, kind)

    monkeypatch.setattr(LayerFactory, "final_norm", norm)
    write_heads(tmp_path, layer_ids=(2, 4, 8))
    with pytest.raises(ConfigError, match=r"does not give the hidden states that leave its last layer.*final_norm"):
        build(target, tmp_path)


def test_engine_refuses_a_model_as_heads_and_heads_as_a_model(target: Path, tmp_path: Path) -> None:
    write_heads(tmp_path)
    with pytest.raises(PluginError, match=r"is not of EAGLE-3 heads"):
        build(target, target)
    with pytest.raises(PluginError, match=r"has EAGLE-3 heads, which are not a model; use the speculator eagle3"):
        build(target, tmp_path, speculator="draft_model")


def test_engine_refuses_heads_of_another_vocabulary(target: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = write_heads(tmp_path)
    save_file({**tensors, "d2t": tensors["d2t"] + 400}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"d2t of the EAGLE-3 heads .* leads to tokens beyond the model's 512"):
        build(target, tmp_path)


def test_config_with_several_layers_is_refused(target: Path, tmp_path: Path) -> None:
    write_heads(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match="EAGLE-3 heads have one"):
        build(target, tmp_path)
