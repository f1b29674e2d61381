"""Every architecture against transformers, with all that config.json may say: logits of tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.errors import CheckpointError
from engine.core.models.base import Model
from engine.core.weights import DummySource
from engine.core.weights.checkpoint import Checkpoint
from engine.plugins.models.llama import Llama
from engine.plugins.models.mistral import Mistral
from engine.plugins.models.qwen2 import Qwen2
from engine.testing.checkpoints import LONGROPE, TINY, make_checkpoint
from engine.testing.model_bench import ModelBench

from .architectures import MODELS, PRE_NORM

LENGTH = 100

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}

CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "mistral-yarn": ("mistral", {"sliding_window": 24, "rope_parameters": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2-mixed": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-yarn": ("qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3-yarn-exact": (
        "qwen3",
        {"rope_parameters": {**YARN, "attention_factor": 1.2, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    ),
    "phi3-long": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
            "rope_parameters": {key: value for key, value in LONGROPE.items() if key != "attention_factor"},
        },
    ),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 0},
    ),
}


def bench_of(directory: Path, **settings: Any) -> ModelBench:
    """The model of a checkpoint, with one prompt to feed it."""
    cls = MODELS[Checkpoint.open(directory).config["model_type"]]
    return ModelBench(cls, directory, [prompt()], **settings)


@torch.inference_mode()
def reference(directory: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model(torch.tensor([tokens])).logits[0]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def prompt() -> list[int]:
    return torch.randint(0, TINY["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()


def edit(directory: Path, **changes: Any) -> None:
    """Change keys of config.json; ... removes one."""
    file = directory / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: Any, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    directory = make_checkpoint(tmp_path, architecture, shards=case.endswith("yarn"), **config)
    expected = reference(directory, prompt())
    bench = bench_of(directory)
    whole = bench.prompt_logits(0)
    chunked = bench.prompt_logits(0, [37, 1, 1, 30, 1, 30])
    assert difference(whole, expected) < 1e-5
    assert difference(chunked, expected) < 1e-5


def test_longrope_chooses_its_factors_by_the_longest_context_that_is_served(tmp_path: Path) -> None:
    architecture, config = CASES["phi3-long"]
    directory = make_checkpoint(tmp_path, architecture, **config)
    short = prompt()[:60]
    expected = reference(directory, short)
    found = {served: ModelBench(MODELS[architecture], directory, [short], max_len=served) for served in (64, 65)}
    assert difference(found[64].prompt_logits(0), expected) < 1e-5
    assert difference(found[65].prompt_logits(0), expected) > 1e-3


def test_comparison_fails_for_a_wrong_model(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "mistral", sliding_window=24)
    expected = reference(directory, prompt())
    edit(directory, sliding_window=25)
    assert difference(bench_of(directory).prompt_logits(0), expected) > 1e-4


@pytest.mark.parametrize(
    ("architecture", "older"),
    [
        ("llama", {"rope_theta": 5000.0}),
        ("llama", {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}}),
        (
            "qwen2",
            {
                "rope_theta": 1e6,
                "max_position_embeddings": 64,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
        ),
        (
            "qwen3",
            {
                "rope_theta": 1e6,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.5,
                },
            },
        ),
    ],
)
def test_older_layout_of_rope_parameters_gives_the_same_logits(architecture: str, older: Any, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, architecture)
    edit(directory, rope_parameters=..., **older)
    expected = reference(directory, prompt())
    assert difference(bench_of(directory).prompt_logits(0), expected) < 1e-5


def test_greedy_is_the_argmax_of_the_logits(tmp_path: Path) -> None:
    bench = bench_of(make_checkpoint(tmp_path, "llama"))
    hidden = torch.randn(5, TINY["hidden_size"], generator=torch.Generator().manual_seed(3))
    logits = bench.model.logits(hidden)
    for peaks, tokens in (bench.model.greedy(hidden), Model.greedy(bench.model, hidden)):
        assert torch.equal(peaks, logits.amax(-1))
        assert torch.equal(tokens, logits.argmax(-1))


def test_dummy_weights_give_finite_logits(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3", attention_bias=True)
    logits = bench_of(directory, source=DummySource(seed=3)).prompt_logits(0)
    assert torch.isfinite(logits).all()
    assert 0.01 < float(logits.std()) < 100


def config_of(architecture: str, **changes: Any) -> dict:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = {
        **TINY,
        "architectures": [f"{names[architecture]}ForCausalLM"],
        "model_type": architecture,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize("architecture", PRE_NORM)
def test_each_model_accepts_only_its_own_architecture(architecture: str) -> None:
    config = config_of(architecture)
    assert [name for name, model in MODELS.items() if model.refuses(config) is None] == [architecture]
    unnamed = config_of(architecture, architectures=...)
    assert [name for name, model in MODELS.items() if model.refuses(unnamed) is None] == [architecture]


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama", {"architectures": ["LlamaForCausalLM"], "hidden_act": "relu"}, "'relu'"),
        ("llama", {"rope_scaling": {"type": "mrope", "factor": 2.0}}, "'mrope'"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ("llama", {"rope_parameters": "yarn"}, "'yarn'"),
        ("qwen3", {"num_experts": 8}, "num_experts"),
    ],
)
def test_refusals_name_the_reason(architecture: str, changes: Any, said: str) -> None:
    refusal = MODELS[architecture].refuses(config_of(architecture, **changes))
    assert refusal is not None
    assert said in refusal


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("llama", {"hidden_size": ...}, "'hidden_size'"),
        ("llama", {"rms_norm_eps": ...}, "'rms_norm_eps'"),
        ("llama", {"num_attention_heads": "4"}, "'num_attention_heads' is '4'"),
        ("llama", {"vocab_size": 0}, "at least 1"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"attention_bias": "yes"}, "'attention_bias'"),
        ("llama", {"head_dim": 15}, "15 dimensions"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "'factor'"),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, "'factor'"),
        ("qwen2", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, "short_factor: a list of 8"),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "'low_freq_factor'"),
        ("qwen3", {"head_dim": ...}, "'head_dim'"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "'max_window_layers'"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]},
            "each of 2 layers",
        ),
    ],
)
def test_missing_key_is_an_error_naming_it(architecture: str, changes: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        MODELS[architecture].spec(config_of(architecture, **changes))
    assert said in str(caught.value)


def test_spec_follows_config_json() -> None:
    spec = Qwen2.spec(
        config_of(
            "qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=8, max_window_layers=2, head_dim=...
        )
    )
    assert spec.sliding_windows == (None, None, 8)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_len) == (4, 2, 16, 512)
    assert spec.scale == 0.25
    assert Mistral.spec(config_of("mistral")).sliding_windows == (4096, 4096)
    assert Mistral.spec(config_of("mistral", sliding_window=None)).sliding_windows == (None, None)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 512),
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "yarn", "factor": 4.0}, 2048),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_yarn_extends_the_longest_context(scaling: Any, longest: Any) -> None:
    assert Llama.spec(config_of("llama", rope_scaling=scaling)).max_len == longest
