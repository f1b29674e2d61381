"""In an engine: the greedy tokens of transformers; in 8 bits, those of the engine's own model of the architecture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.core import Engine, SamplingParams
from engine.testing.checkpoints import make_checkpoint

CASES: dict[str, dict[str, Any]] = {
    "gemma2": {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
    },
}
"""Architecture -> keys of config.json that the conformance tests leave at their defaults."""
QUANT = {"gemma2": "int8", "qwen3_moe": "fp8"}
PROMPTS = [list(range(40, 70)), [7, 8, 9]]
STEPS = 8


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    settings = {"sliding_window": 24, **CASES[name]}
    return make_checkpoint(tmp_path_factory.mktemp("models") / name, name, tokenizer=True, **settings)


def third_party(checkpoint: Path) -> str:
    return f"third-party-{checkpoint.name.replace('_', '-')}"


def greedy(engine: Engine) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    return [list(completion.token_ids) for completion in engine.generate(PROMPTS, params)]


def reference(checkpoint: Path) -> list[list[int]]:
    library: Any = transformers  # without types
    model = library.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        tokens = model.generate(
            torch.tensor([prompt]), attention_mask=mask, do_sample=False, max_new_tokens=STEPS, pad_token_id=0
        )
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def test_greedy_tokens_are_those_of_transformers(make_engine: Callable[..., Engine], checkpoint: Path) -> None:
    engine = make_engine(model=str(checkpoint), model__name=third_party(checkpoint))
    assert greedy(engine) == reference(checkpoint)


def test_quantized_tokens_are_those_of_the_engines_own_model(
    make_engine: Callable[..., Engine], checkpoint: Path
) -> None:
    ours, native = (
        make_engine(model=str(checkpoint), model__name=name, quant=QUANT[checkpoint.name])
        for name in (third_party(checkpoint), checkpoint.name)
    )
    assert greedy(ours) == greedy(native)
    assert ours.cache_info.weights_bytes == native.cache_info.weights_bytes
