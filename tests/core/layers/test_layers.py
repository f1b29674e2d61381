"""Norms, embedding, LM head, activation and the attention layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.core.errors import ConfigError
from engine.core.layers import Attention, HeadNorm, LayerFactory, RMSNorm, RotarySpec, gated_activation, silu_and_mul
from engine.core.layers.rotary import Rotary, rotate


def reference_norm(x: Any, weight: Any, eps: Any) -> Any:
    """In float32, cast back, then times the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-7), ("float16", 2**-9)])
def test_rms_norm_equals_the_reference(dtype: Any, tolerance: float) -> None:
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    x, residual, weight = torch.randn(7, 64).to(kind), torch.randn(7, 64).to(kind), torch.randn(64).to(kind)
    norm = RMSNorm("norm.weight", 64, 1e-5, dtype)
    norm.fill({"norm.weight": weight})
    plain, same = norm(x)
    assert torch.equal(same, x)
    torch.testing.assert_close(plain, reference_norm(x, weight, 1e-5), rtol=tolerance, atol=tolerance)
    fused, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert fused.dtype == kind
    torch.testing.assert_close(fused, reference_norm(total, weight, 1e-5), rtol=tolerance, atol=tolerance)


def test_rms_norm_of_tiny_values_uses_eps() -> None:
    norm = RMSNorm("norm.weight", 4, 1.0, "float32")
    norm.fill({"norm.weight": torch.ones(4)})
    torch.testing.assert_close(norm(torch.full((1, 4), 1e-3))[0], torch.full((1, 4), 1e-3), rtol=1e-5, atol=0)


def test_norm_does_not_change_its_inputs() -> None:
    norm = RMSNorm("norm.weight", 4, 1e-6, "float32")
    norm.fill({"norm.weight": torch.ones(4)})
    x, residual = torch.ones(1, 4), torch.ones(1, 4)
    norm(x, residual)
    assert torch.equal(x, torch.ones(1, 4))
    assert torch.equal(residual, torch.ones(1, 4))


def test_head_norm_equals_the_reference() -> None:
    torch.manual_seed(0)
    x, queries, keys = torch.randn(5, 6, 8), torch.randn(8), torch.randn(8)
    norm = HeadNorm((("q.weight", 4), ("k.weight", 2)), 8, 1e-6, "float32")
    assert {name: spec.shape for name, spec in norm.tensors().items()} == {"q.weight": (8,), "k.weight": (8,)}
    norm.fill({"q.weight": queries, "k.weight": keys})
    expected = torch.cat([reference_norm(x[:, :4], queries, 1e-6), reference_norm(x[:, 4:], keys, 1e-6)], 1)
    torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("over_heads", [False, True])
def test_norm_with_an_offset_equals_transformers_in_bfloat16_to_the_last_bit(over_heads: bool) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    torch.manual_seed(0)
    x, weight = torch.randn(7, 2, 64).to(torch.bfloat16), (torch.randn(64) * 0.003).to(torch.bfloat16)
    theirs = Gemma2RMSNorm(64, 1e-6)
    theirs.weight.data = weight
    if over_heads:
        norm: Any = HeadNorm((("norm.weight", 2),), 64, 1e-6, "bfloat16", unit_offset=True)
    else:
        norm = RMSNorm("norm.weight", 64, 1e-6, "bfloat16", unit_offset=True)
    norm.fill({"norm.weight": weight})
    found = norm(x) if over_heads else norm(x)[0]
    assert torch.equal(found, theirs(x))
    norm.weight = norm.weight.to(torch.bfloat16).float()  # 1 plus so little is 1 in bfloat16
    assert not torch.equal(norm(x) if over_heads else norm(x)[0], theirs(x))


@pytest.mark.parametrize("kind", ["layer", "layer_bias"])
def test_layer_norm_equals_torch(kind: Any) -> None:
    layers = LayerFactory(dtype="float32", device="cpu")
    norm = layers.norm("norm", 8, 1e-5, kind)
    weights = {name: torch.randn(8) for name in norm.tensors()}
    assert sorted(weights) == ["norm.bias", "norm.weight"][kind == "layer" :]
    norm.fill(weights)
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    found, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    expected = F.layer_norm(total, (8,), weights["norm.weight"], weights.get("norm.bias"), 1e-5)
    torch.testing.assert_close(found, expected)
    assert norm.nbytes == len(weights) * 32


def test_silu_and_mul_does_not_change_its_input() -> None:
    x = torch.randn(3, 10)
    kept = x.clone()
    torch.testing.assert_close(silu_and_mul(x), F.silu(x[:, :5]) * x[:, 5:])
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("gelu", lambda gate, up: F.gelu(gate) * up),
        ("gelu_tanh", lambda gate, up: F.gelu(gate, approximate="tanh") * up),
        (
            "swiglu_oai",
            lambda gate, up: gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1),
        ),
    ],
)
def test_other_activations_do_not_change_their_input(activation: Any, expected: Any) -> None:
    x = torch.randn(3, 10) * 6
    kept = x.clone()
    torch.testing.assert_close(gated_activation(activation)(x), expected(x[:, :5], x[:, 5:]))
    assert torch.equal(x, kept)


def test_activation_that_needs_a_gate_is_refused_for_an_mlp_without() -> None:
    layers = LayerFactory(dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="swiglu_oai needs a gate; use one of silu, gelu, gelu_tanh"):
        layers.mlp("up", "down", 4, 8, norm="norm", eps=1e-5, activation="swiglu_oai")


def test_lm_head_multiplies_by_the_tied_embedding_or_by_its_own_weight() -> None:
    layers = LayerFactory(dtype="float32", device="cpu")
    embedding = layers.embedding("embed", 6, 4)
    tied = layers.lm_head("lm_head", 6, 4, embedding)
    assert layers.ignored == ["lm_head.weight"]
    own = layers.lm_head("lm_head", 6, 4)
    table, head = torch.randn(6, 4), torch.randn(6, 4)
    for layer in layers.layers:
        layer.fill({"embed.weight": table, "lm_head.weight": head})
    assert torch.equal(embedding(torch.tensor([5, 0])), table[[5, 0]])
    x = torch.randn(2, 4)
    torch.testing.assert_close(tied(x), x @ table.T)
    torch.testing.assert_close(own(x), x @ head.T)
    tables, packed_heads = 2 * 6 * 4 * 4, 2 * 6 * 4 * 4
    assert layers.nbytes == tables + packed_heads


def test_embedding_is_scaled_by_a_factor_of_the_dtype_and_the_tied_head_is_not() -> None:
    layers = LayerFactory(dtype="bfloat16", device="cpu")
    embedding = layers.embedding("embed", 6, 4, scale=61.97)  # 62 in bfloat16
    head = layers.lm_head("lm_head", 6, 4, embedding)
    table = torch.randn(6, 4).to(torch.bfloat16)
    for layer in layers.layers:
        layer.fill({"embed.weight": table})
    tokens = torch.tensor([5, 0])
    assert torch.equal(embedding(tokens), table[tokens] * torch.tensor(62.0, dtype=torch.bfloat16))
    torch.testing.assert_close(head(table[:2]), table[:2] @ table.T)


def test_greedy_is_the_first_of_the_largest_capped_logits() -> None:
    layers = LayerFactory(dtype="float32", device="cpu")
    head = layers.lm_head("lm_head", 3, 2, scale=0.5, softcap=4.0)
    for layer in layers.layers:
        layer.fill({"lm_head.weight": torch.tensor([[1.0, 0.0], [900.0, 0.0], [1000.0, 1.0]])})
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    logits = head(hidden)
    torch.testing.assert_close(logits, 4 * torch.tanh(torch.tensor([[0.5, 450.0, 500.0], [0.0, 0.0, 0.5]]) / 4))
    max_logits, tokens = head.greedy(hidden)
    assert tokens.tolist() == [1, 2]  # 450 and 500 are both capped to 4
    assert torch.equal(max_logits, logits.amax(-1))


def test_attention_rotates_writes_to_the_cache_and_attends() -> None:
    written = []
    run = SimpleNamespace(
        batch=SimpleNamespace(slots=torch.tensor([3, 1])),
        plan="the plan",
        pool=SimpleNamespace(write=lambda *values: written.append(values)),
        attention=SimpleNamespace(forward=lambda layer, q, k, v, plan: q if (layer, plan) == (2, "the plan") else None),
    )
    torch.manual_seed(0)
    qkv = torch.randn(2, (4 + 2 + 2) * 8)
    heads = qkv.view(2, 8, 8)
    rotary = Rotary(RotarySpec(rotary_dim=8, type="default", parameters={}), "float32", "cpu")
    angles = rotary.angles(torch.tensor([5, 0]))
    attention = Attention(2, num_heads=4, num_kv_heads=2, head_dim=8)
    out = attention(run, qkv, angles)
    torch.testing.assert_close(out, rotate(heads[:, :4], angles).flatten(1))
    [(layer, keys, values, slots)] = written
    assert layer == 2
    torch.testing.assert_close(keys, rotate(heads[:, 4:6], angles))
    assert torch.equal(values, heads[:, 6:])
    assert torch.equal(slots, run.batch.slots)

    norm = HeadNorm((("q.weight", 4), ("k.weight", 2)), 8, 1e-6, "float32")
    norm.fill({"q.weight": torch.randn(8), "k.weight": torch.randn(8)})
    out = Attention(2, num_heads=4, num_kv_heads=2, head_dim=8, norm=norm)(run, qkv, angles)
    normed = norm(heads[:, :6])
    torch.testing.assert_close(out, rotate(normed[:, :4], angles).flatten(1))
    torch.testing.assert_close(written[1][1], rotate(normed[:, 4:], angles))
    assert torch.equal(written[1][2], heads[:, 6:])


def test_greedy_is_the_first_of_equal_max_logits() -> None:
    layers = LayerFactory(dtype="float32", device="cpu")
    head = layers.lm_head("lm_head", 5, 2)
    for layer in layers.layers:
        layer.fill({"lm_head.weight": torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 1.0], [2.0, 1.0], [0.0, 3.0]])})
    max_logits, tokens = head.greedy(torch.tensor([[1.0, 0.0], [0.0, 1.0], [float("nan"), 1.0]]))
    assert max_logits.dtype == torch.float32
    assert tokens[:2].tolist() == [2, 4]
    assert max_logits[:2].tolist() == [2.0, 3.0]
    assert max_logits[2].isnan()
