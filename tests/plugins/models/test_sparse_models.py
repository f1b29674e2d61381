"""Mixtures of experts against transformers: logits of tiny random checkpoints, in both layouts, on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.core.distributed import RankGroup
from engine.core.errors import CheckpointError, ConfigError
from engine.core.layers import SparseMLP
from engine.core.weights import Checkpoint
from engine.testing.checkpoints import make_checkpoint
from engine.testing.model_bench import ModelBench
from engine.testing.ranks import run_ranks, threaded_ranks
from tests.reference_tokens import greedy_tokens

from .architectures import SPARSE
from .test_models import difference, edit, prompt, reference

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24}),
    "qwen2": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen2-mixed": (
        "qwen2_moe",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 48,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 3,
        },
    ),
    "qwen3": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "num_hidden_layers": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3-all-chosen": ("qwen3_moe", {**EXPERTS, "num_experts_per_tok": 8, "attention_bias": True}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the checkpoint of a case, once."""
    made: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in made:
            architecture, config = CASES[case]
            made[case] = make_checkpoint(tmp_path_factory.mktemp("model"), architecture, tokenizer=True, **config)
        return made[case]

    return make


def bench_of(directory: Path, **settings: Any) -> ModelBench:
    return ModelBench(SPARSE[Checkpoint.open(directory).config["model_type"]], directory, [prompt()], **settings)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, checkpoints: Any) -> None:
    bench = bench_of(checkpoints(case))
    wanted = reference(checkpoints(case), prompt())
    assert difference(bench.prompt_logits(0), wanted) < 1e-5
    assert difference(bench.prompt_logits(0, [37, 1, 1, 30, 1, 30]), wanted) < 1e-5


@pytest.mark.parametrize("case", ["mixtral", "qwen2", "qwen3"])
def test_stacked_layout_gives_the_same_logits(case: str, checkpoints: Any, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    stacked = make_checkpoint(tmp_path, architecture, stacked=True, **config)
    assert torch.equal(bench_of(stacked).prompt_logits(0), bench_of(checkpoints(case)).prompt_logits(0))
    assert difference(on_ranks(stacked, 2), bench_of(stacked).prompt_logits(0)) < 1e-5


def on_ranks(path: Path, ranks: int, **settings: Any) -> torch.Tensor:
    """The logits that all ranks have."""

    def work(group: RankGroup) -> torch.Tensor:
        return bench_of(path, group=group, **settings).prompt_logits(0)

    first, *others = run_ranks(ranks, work)
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensor", "expert"])
@pytest.mark.parametrize(("case", "ranks"), [("mixtral", 2), ("qwen2-mixed", 4), ("gpt-oss", 2)])
def test_ranks_compute_what_one_does(case: str, ranks: int, expert_parallel: bool, checkpoints: Any) -> None:
    alone = bench_of(checkpoints(case)).prompt_logits(0)
    assert difference(on_ranks(checkpoints(case), ranks, expert_parallel=expert_parallel), alone) < 1e-5


@pytest.mark.parametrize("case", ["mixtral", "qwen2", "qwen3", "gpt-oss"])
def test_greedy_tokens_equal_transformers_on_one_rank_and_several(case: str, checkpoints: Any) -> None:
    path, prompts = checkpoints(case), [prompt()[:5], prompt()[:30]]
    wanted = greedy_tokens(path, prompts, 8)
    settings: dict[str, Any] = {"executor__device": "cpu", "model__dtype": "float32", "cache__memory": "4MiB"}
    for more in ({}, {"executor": threaded_ranks(2), "executor__expert_parallel": True}):
        with Engine(model=str(path), **settings, **more) as engine:
            found = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        assert [list(completion.token_ids) for completion in found] == wanted


def test_random_weights_give_finite_logits_in_either_layout(checkpoints: Any) -> None:
    from engine.core.weights import DummySource

    for case in ("mixtral", "qwen2"):
        logits = bench_of(checkpoints(case), source=DummySource(seed=3)).prompt_logits(0)
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("case", ["mixtral", "qwen2", "qwen3", "gpt-oss"])
def test_no_key_is_unknown_in_what_transformers_writes(case: str, checkpoints: Any) -> None:
    config = Checkpoint.open(checkpoints(case)).config
    assert SPARSE[config["model_type"]].unknown_keys(config) == []


def test_sparse_layers_are_those_of_the_config(checkpoints: Any) -> None:
    blocks = bench_of(checkpoints("qwen2-mixed")).model._blocks  # type: ignore[attr-defined]
    assert [isinstance(block.mlp, SparseMLP) for block, _ in blocks] == [False, True, False, False]


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise: 0.1"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok (5) is more than num_local_experts (4)"),
        ("qwen2", {"mlp_only_layers": "all"}, "mlp_only_layers"),
        ("qwen2", {"shared_expert_intermediate_size": ...}, "'shared_expert_intermediate_size'"),
        ("qwen3", {"moe_intermediate_size": ...}, "'moe_intermediate_size'"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused(
    case: str, changes: dict[str, Any], said: str, checkpoints: Any
) -> None:
    config = {**Checkpoint.open(checkpoints(case)).config, **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    model = SPARSE[config["model_type"]]
    refusal = model.refuses(config)
    if refusal is None:
        with pytest.raises(CheckpointError) as caught:
            model.spec(config)
        refusal = str(caught.value)
    assert said in refusal


def test_experts_that_ranks_cannot_share_are_refused(checkpoints: Any, tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path, "qwen3_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=33, num_attention_heads=4
    )
    with pytest.raises(ConfigError, match=r"2 ranks cannot share 33 intermediate features of .*--expert-parallel"):
        on_ranks(path, 2)
    with pytest.raises(ConfigError, match="2 ranks cannot share 3 experts evenly"):
        on_ranks(path, 2, expert_parallel=True)


def test_expert_parallelism_of_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"--expert-parallel.* no experts"):
        Engine(model=str(path), executor__device="cpu", executor__expert_parallel=True)


def test_comparison_fails_for_factors_that_are_not_renormalized(checkpoints: Any, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, *CASES["qwen3"][:1], **CASES["qwen3"][1])
    wanted = reference(path, prompt())
    edit(path, norm_topk_prob=False)
    assert difference(bench_of(path).prompt_logits(0), wanted) > 1e-3
