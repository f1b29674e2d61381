"""Composite layers equal the sequence of their layers, and return partial sums."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.core.distributed import PartialSum, RankGroup
from engine.core.errors import ConfigError
from engine.core.layers import LayerFactory, RotarySpec, silu_and_mul
from engine.core.quant import TensorSpec
from engine.testing.ranks import LoneRank, run_ranks

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, EPS = 16, 4, 2, 8, 24, 1e-5


def factory(group: RankGroup | None = None) -> LayerFactory:
    return LayerFactory(dtype="float32", device="cpu", group=group)


def fill(layers: LayerFactory) -> None:
    """Fill all layers with random weights, which depend on tensor names only."""
    for layer in layers.layers:
        layer.fill({name: weight(name, spec, layers) for name, spec in layer.tensors().items()})


def weight(name: str, spec: TensorSpec, layers: LayerFactory) -> torch.Tensor:
    whole = torch.randn(spec.shape, generator=torch.Generator().manual_seed(sum(name.encode())))
    if spec.shard_dim is None:
        return whole
    return whole.chunk(layers.ranks // spec.replicas, spec.shard_dim)[layers.rank // spec.replicas]


def forward_pass() -> Any:
    """A pass whose attention adds the means of keys and values to queries."""
    return SimpleNamespace(
        batch=SimpleNamespace(slots=None),
        plan=None,
        pool=SimpleNamespace(write=lambda *_: None),
        attention=SimpleNamespace(forward=lambda layer, q, k, v, plan: q + k.mean() + v.mean()),
    )


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, HIDDEN, generator=generator), torch.randn(3, HIDDEN, generator=generator)


def attention_block(layers: LayerFactory, **settings: Any) -> Any:
    shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "eps": EPS}
    return layers.attention_block(0, "attn", HIDDEN, norm="norm", **shape, **settings)


def mlp(layers: LayerFactory) -> Any:
    return layers.mlp("up", "down", HIDDEN, INTERMEDIATE, norm="mlp_norm", eps=EPS, norm_kind="layer")


def gated_mlp(layers: LayerFactory, **settings: Any) -> Any:
    return layers.gated_mlp("mlp", HIDDEN, INTERMEDIATE, norm="norm", eps=EPS, **settings)


def attention_layers(layers: LayerFactory, bias: bool) -> Any:
    """The layers of an attention block in sequence, with a reducing output projection."""
    norm = layers.norm("norm", HIDDEN, EPS)
    names = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
    qkv = layers.qkv(names, HIDDEN, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, bias=bias)
    heads, kv_heads = layers.shard(HEADS, "heads"), layers.shard_kv_heads(KV_HEADS)
    head_norm = layers.head_norm([("attn.q_norm", heads), ("attn.k_norm", kv_heads)], HEAD_DIM, EPS)
    attention = layers.attention(0, heads, kv_heads, HEAD_DIM, head_norm)
    output = layers.linear([("attn.o_proj", HIDDEN)], HEADS * HEAD_DIM, bias=bias, parallel="row")

    def call(run: Any, hidden: Any, residual: Any, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = norm(hidden, residual)
        return output(attention(run, qkv(normed), angles)), total

    return call


def mlp_layers(layers: LayerFactory, bias: bool) -> Any:
    """The layers of a gated MLP in sequence, with a reducing down projection."""
    norm = layers.norm("norm", HIDDEN, EPS)
    parts = [("mlp.gate_proj", INTERMEDIATE), ("mlp.up_proj", INTERMEDIATE)]
    gate_up = layers.linear(parts, HIDDEN, bias=bias, parallel="column")
    down = layers.linear([("mlp.down_proj", HIDDEN)], INTERMEDIATE, bias=bias, parallel="row")

    def call(hidden: Any, residual: Any) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = norm(hidden, residual)
        return down(silu_and_mul(gate_up(normed))), total

    return call


def on_ranks(ranks: int, work: Any) -> list[Any]:
    return [work(None)] if ranks == 1 else run_ranks(ranks, work)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_attention_block_equals_its_layers(ranks: int, bias: bool) -> None:
    spec = RotarySpec(rotary_dim=HEAD_DIM, type="default", parameters={})

    def work(group: RankGroup | None) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        blocks, single = factory(group), factory(group)
        block = attention_block(blocks, qkv_bias=bias, output_bias=bias, qk_norm=True)
        layers = attention_layers(single, bias)
        angles = single.rotary(spec).angles(torch.tensor([0, 7, 300]))
        fill(blocks)
        fill(single)
        found, residual = block(forward_pass(), *inputs(), angles)
        return {"block": (found.reduce(), residual), "layers": layers(forward_pass(), *inputs(), angles)}

    for found in on_ranks(ranks, work):
        for one, other in zip(found["block"], found["layers"], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gated_mlp_equals_its_layers(ranks: int, bias: bool) -> None:
    def work(group: RankGroup | None) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        blocks, single = factory(group), factory(group)
        block, layers = gated_mlp(blocks, bias=bias), mlp_layers(single, bias)
        fill(blocks)
        fill(single)
        found, residual = block(*inputs())
        return {"block": (found.reduce(), residual), "layers": layers(*inputs())}

    expected = None
    for found in on_ranks(ranks, work):
        for one, other in zip(found["block"], found["layers"], strict=True):
            torch.testing.assert_close(one, other)
        expected = on_ranks(1, work)[0]["layers"] if expected is None else expected
        torch.testing.assert_close(found["block"][0], expected[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_norm_their_result_after_the_reduction(ranks: int) -> None:
    spec = RotarySpec(rotary_dim=HEAD_DIM, type="default", parameters={})

    def work(group: RankGroup | None) -> Any:
        layers = factory(group)
        settings = {"output_norm": "after", "norm_kind": "rms_unit_offset"}
        blocks = attention_block(layers, **settings), gated_mlp(layers, **settings, activation="gelu_tanh")
        plain = (
            attention_block(layers, norm_kind="rms_unit_offset"),
            gated_mlp(layers, norm_kind="rms_unit_offset", activation="gelu_tanh"),
        )
        after = layers.norm("after", HIDDEN, EPS, "rms_unit_offset")
        angles = layers.rotary(spec).angles(torch.tensor([0, 7, 300]))
        fill(layers)
        arguments = (forward_pass(), *inputs(), angles), inputs()
        found = [block(*given) for block, given in zip(blocks, arguments, strict=True)]
        expected = [block(*given) for block, given in zip(plain, arguments, strict=True)]
        return found, [(after(hidden)[0], residual) for hidden, residual in expected]

    for found, expected in on_ranks(ranks, work):
        torch.testing.assert_close(found, expected)


def test_block_without_an_input_norm_takes_the_residual_and_scales_its_result() -> None:
    layers = factory()
    settings = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "eps": EPS}
    scaled = layers.gated_mlp("mlp", **settings, norm="", output_scale=0.25)
    gate_up = layers.linear([("mlp.gate_proj", INTERMEDIATE), ("mlp.up_proj", INTERMEDIATE)], HIDDEN)
    down = layers.linear([("mlp.down_proj", HIDDEN)], INTERMEDIATE)
    fill(layers)
    hidden, residual = inputs()
    found, total = scaled(hidden, residual)
    assert torch.equal(total, hidden + residual)
    torch.testing.assert_close(found.reduce(), 0.25 * down(silu_and_mul(gate_up(total))))


def test_block_with_both_a_norm_and_a_factor_of_its_result_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a norm of its result \(after\) or a factor"):
        gated_mlp(factory(), output_norm="after", output_scale=0.5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_norm_reduces_a_partial_sum(ranks: int) -> None:
    def work(group: RankGroup | None) -> Any:
        layers = factory(group)
        mlp, norm = gated_mlp(layers), layers.norm("last", HIDDEN, EPS)
        fill(layers)
        hidden, residual = mlp(*inputs())
        return norm(PartialSum(hidden.addend.clone(), hidden._group), residual), norm(hidden.reduce(), residual)

    for reduced_by_norm, reduced_before in on_ranks(ranks, work):
        for one, other in zip(reduced_by_norm, reduced_before, strict=True):
            assert torch.equal(one, other)


def test_partial_sums_of_two_layers_are_reduced_as_one() -> None:
    class Counting(LoneRank):
        calls = 0

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return 2 * x

    group = Counting(0, 2)
    both = PartialSum(torch.ones(3), group) + PartialSum(torch.full((3,), 2.0), group)
    assert torch.equal(both.reduce(), torch.full((3,), 6.0))
    assert group.calls == 1


@pytest.mark.parametrize("group", [None, LoneRank(1, 2)])
def test_using_a_partial_sum_as_a_tensor_is_an_error_with_any_number_of_ranks(group: RankGroup | None) -> None:
    layers = factory(group)
    mlp, head = gated_mlp(layers), layers.lm_head("head", 40, HIDDEN)
    linear, head_norm = layers.linear([("next", 3)], HIDDEN), layers.head_norm([("q_norm", 1)], HIDDEN, EPS)
    for layer in layers.layers:
        shapes = {name: list(spec.shape) for name, spec in layer.tensors().items()}
        for name, spec in layer.tensors().items():
            if spec.shard_dim is not None:
                shapes[name][spec.shard_dim] //= layers.ranks
        layer.fill({name: torch.ones(shape) for name, shape in shapes.items()})
    hidden, residual = mlp(*inputs())
    assert isinstance(hidden, PartialSum)
    for use in (
        lambda: hidden + residual,
        lambda: residual + hidden,
        lambda: hidden * 2,
        lambda: linear(hidden),
        lambda: head_norm(hidden),
        lambda: head(hidden),
        lambda: F.silu(hidden),
        lambda: torch.cat([residual, hidden]),
    ):
        with pytest.raises(TypeError, match="PartialSum"):
            use()
