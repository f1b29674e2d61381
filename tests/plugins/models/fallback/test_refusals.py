"""What the plugin `transformers` refuses, and why: each refusal is a sentence that names the architecture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.attention import AttentionSpec
from engine.core.errors import CheckpointError, ConfigError
from engine.plugins.models.fallback.errors import RefusedError
from engine.plugins.models.fallback.locality import check_locality
from engine.plugins.models.fallback.masks import sliding_window
from engine.plugins.models.transformers import Transformers
from engine.testing.checkpoints import TINY, make_checkpoint
from engine.testing.model_bench import ModelBench
from engine.testing.ranks import LoneRank

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "other tokens in chunks": (
        "Llama4ForCausalLM",
        {"model_type": "llama4_text", "attention_chunk_size": 32, "num_local_experts": 2, "intermediate_size_mlp": 96},
        "another pattern than",
    ),
    "a recurrence": ("MambaForCausalLM", {"model_type": "mamba"}, "does not call attention by the library's interface"),
    "an encoder": (
        "BartForCausalLM",
        {"model_type": "bart", "d_model": 64, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64},
        "is an encoder-decoder",
    ),
    "unknown": ("NewForCausalLM", {"model_type": "new"}, "has no causal language model"),
    "its own code": (
        "NewForCausalLM",
        {"model_type": "new", "auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}},
        "the code that the checkpoint brings \\(auto_map\\) is never run",
    ),
    "a key the library ignores": (
        "GlmForCausalLM",
        {"model_type": "glm", "use_mrope": True, "pad_token_id": 0},
        "has use_mrope: True in config.json, which transformers .* does not compute",
    ),
    "a wrong value": ("GlmForCausalLM", {"model_type": "glm", "hidden_act": "none such"}, "cannot be built by"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_architecture_that_cannot_be_served_is_refused_with_the_reason(case: str) -> None:
    architecture, changes, reason = CASES[case]
    refusal = Transformers.refuses({**TINY, "architectures": [architecture], **changes})
    assert refusal is not None
    assert refusal.startswith(architecture)
    assert re.search(reason, refusal), refusal


def test_a_plan_without_ranks_is_refused_on_several(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gpt2")
    with pytest.raises(ConfigError, match="no tensor-parallel plan"):
        ModelBench(Transformers, directory, [[1, 2, 3]], group=LoneRank(0, 2))


def test_contexts_are_limited_where_rope_would_change_with_the_longest_of_a_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    directory = make_checkpoint(tmp_path, "llama", max_position_embeddings=64, rope_parameters=rope)
    bench = ModelBench(Transformers, directory, [[1, 2, 3]])
    assert bench.spec.max_len == 64
    assert bench.model.no_graphs is None
    assert "contexts of LlamaForCausalLM are limited to 64 tokens" in caplog.text


def windows(window: int) -> Any:
    return lambda batch, head, query, key: (key <= query) & (key > query - window)


def test_windows_are_recognized_by_what_the_mask_shows() -> None:
    assert sliding_window(lambda batch, head, query, key: key <= query, 100) is None
    assert sliding_window(windows(24), 100) == 24
    assert sliding_window(windows(100), 100) is None
    chunks: Any = lambda batch, head, query, key: (key <= query) & (key // 25 == query // 25)  # noqa: E731
    with pytest.raises(RefusedError, match="another pattern"):
        sliding_window(chunks, 100)
    with pytest.raises(RefusedError, match="another pattern"):
        sliding_window(lambda batch, head, query, key: (key <= query) | (key < 3), 100)


SPEC = AttentionSpec(
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    scale=0.5,
    dtype="float32",
    kv_dtype="float32",
    block_size=1,
    max_len=100,
    sliding_windows=(None,),
)


@pytest.mark.parametrize(
    ("mixes", "mix"),
    [
        (False, lambda x, positions: x * positions[:, None]),
        (True, lambda x, positions: x.cumsum(0)),
        (True, lambda x, positions: x + x.mean(0)),
        (True, lambda x, positions: x + torch.arange(len(x))[:, None]),
        (True, lambda x, positions: x + x.roll(1, 0)),
    ],
)
def test_a_forward_that_mixes_tokens_outside_of_attention_is_refused(mixes: bool, mix: Any) -> None:
    table = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))

    def forward(run: Any) -> torch.Tensor:
        heads = table[run.batch.tokens][:, None]
        return mix(run.attention.forward(0, heads, heads, heads, None)[:, 0], run.batch.positions)

    if not mixes:
        check_locality(forward, [SPEC], 50, "cpu", "Fine")
        return
    with pytest.raises(CheckpointError, match="Mixing of transformers mixes the tokens of a batch"):
        check_locality(forward, [SPEC], 50, "cpu", "Mixing")
