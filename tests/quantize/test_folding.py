from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from engine.core.errors import CheckpointError
from engine.quantize.folding import check_exact, find_folds

MERGED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
HEAD_DIM = 16


def decoder_layer(kind: Any, **config: Any) -> Any:
    """The first layer of a random model in float64, and the outputs of a layer for some inputs."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1}
    sizes |= {"num_key_value_heads": 2, "head_dim": HEAD_DIM, "vocab_size": 64, "initializer_range": 0.2}
    built = transformers.AutoConfig.for_model(kind, pad_token_id=None, **sizes, **config)
    model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    hidden = torch.randn(1, 9, 64)
    positions = torch.arange(9)[None]
    angles = model.model.rotary_emb(hidden, positions)

    def run(layer: Any) -> Any:
        with torch.no_grad():
            return layer(hidden, attention_mask=None, position_embeddings=angles, position_ids=positions)

    return model.model.layers[0], run


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_changes_weights_and_no_outputs(kind: Any, dtype: Any) -> None:
    layer, run = decoder_layer(kind)
    before = run(layer)
    weights = {name: one.detach().clone() for name, one in layer.named_parameters()}
    folds = find_folds(layer, MERGED, HEAD_DIM)
    assert [fold.linears for fold in folds] == list(MERGED)
    with torch.no_grad():
        for fold in folds:
            inputs = layer.get_submodule(fold.linears[0]).in_features
            scales = torch.rand(inputs) * 3 + 0.3
            fold.apply(layer, scales if fold.shared is None else scales[fold.shared], dtype)
    torch.testing.assert_close(run(layer), before, atol=2e-4, rtol=1e-4)
    changed = {name for name, one in layer.named_parameters() if not torch.equal(one, weights[name])}
    assert {f"{name}.weight" for names in MERGED for name in names} <= changed
    norm = layer.input_layernorm.weight.detach()
    assert torch.equal(norm, norm.to(dtype).float())  # as it will be stored


def test_norms_of_zero_are_not_scaled() -> None:
    layer, run = decoder_layer("llama")
    with torch.no_grad():
        layer.input_layernorm.weight[3] = 0.0
    before = run(layer)
    [fold, *_] = find_folds(layer, MERGED, HEAD_DIM)
    with torch.no_grad():
        scales = fold.apply(layer, torch.full((64,), 2.0), torch.float32)
    assert scales[3] == 1
    assert scales[2] == 2
    torch.testing.assert_close(run(layer), before, atol=2e-4, rtol=1e-4)


def test_unknown_layer_is_an_error() -> None:
    layer, _ = decoder_layer("llama")
    with pytest.raises(CheckpointError, match=r"mlp\.fc1.*--method gptq"):
        find_folds(layer, [("mlp.fc1",)], HEAD_DIM)


def test_layer_with_llama_names_but_other_norms_is_an_error() -> None:
    layer, run = decoder_layer("llama")
    folds = find_folds(layer, MERGED, HEAD_DIM)
    check_exact(layer, folds, run, torch.float32)

    class PlusOne(type(layer.input_layernorm)):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    layer.input_layernorm.__class__ = PlusOne
    with pytest.raises(CheckpointError, match="awq cannot scale this architecture"):
        check_exact(layer, folds, run, torch.float32)
