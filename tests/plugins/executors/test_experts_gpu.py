"""GPUs share the experts of a Qwen3-MoE: the greedy tokens are those of one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.core import Engine, SamplingParams
from engine.core.config.default_model import demo_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * row + 3 * column) % 4096 for column in range(5 + 13 * row)] for row in range(6)]


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Qwen3-30B-A3B in their published widths, with the vocabulary of the demo model."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    directory = tmp_path_factory.mktemp("qwen3-moe")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(directory)
    del model
    torch.cuda.empty_cache()
    return directory


def tokens(checkpoint: Path, ranks: int) -> list[list[int]]:
    settings: dict[str, Any] = {
        "model__dtype": "float32",
        "model__max_len": 256,
        "cache__memory": "256MiB",
        "executor__device": "cuda",
    }
    settings |= {"model__tokenizer": demo_model(), "executor__tensor_parallel": ranks}
    with Engine(model=str(checkpoint), **settings) as engine:
        return [list(made.token_ids) for made in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_choose_the_tokens_of_one_gpu(wide_checkpoint: Path, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs; torch sees {torch.cuda.device_count()}")
    assert tokens(wide_checkpoint, ranks) == tokens(wide_checkpoint, 1)
