"""Experts and their router: both layouts of checkpoints, shards of ranks, fused kernels, plugins' kernels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.core.distributed import RankGroup
from engine.core.errors import CheckpointError, ConfigError, PluginError, StepFaultError
from engine.core.layers import Experts, LayerFactory, RoutingSpec, SharedExpertSpec, SparseMLPSpec, matmul
from engine.core.layers.experts import PlainExperts
from engine.core.layers.matmul import can_pack
from engine.core.plugin_host.result_checks import ResultChecks
from engine.core.quant import ExpertsKernel, LinearKernel, QuantMethod, Routing
from engine.core.weights import Checkpoint, DummySource, SafetensorsSource, load_weights
from engine.plugins.quant.fp8 import Fp8
from engine.testing.ranks import LoneRank

HIDDEN, INNER, EXPERTS, TOP_K = 16, 12, 4, 2


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X = draw(5, HIDDEN)
ROUTING = Routing(torch.tensor([[0, 2], [2, 0], [2, 3], [3, 2], [0, 2]]).int(), draw(5, TOP_K).abs())
GATE, UP, DOWN = draw(EXPERTS, INNER, HIDDEN), draw(EXPERTS, INNER, HIDDEN) * 2, draw(EXPERTS, HIDDEN, INNER)
GATE_BIAS, UP_BIAS, DOWN_BIAS = draw(EXPERTS, INNER), draw(EXPERTS, INNER) * 2, draw(EXPERTS, HIDDEN)


def checkpoint(directory: Path, layout: str) -> SafetensorsSource:
    """The same experts in a layout: modules, stacked, or as gpt-oss."""
    if layout == "modules":
        tensors = {}
        for expert in range(EXPERTS):
            for name, weight, bias in (("gate", GATE, GATE_BIAS), ("up", UP, UP_BIAS), ("down", DOWN, DOWN_BIAS)):
                tensors[f"experts.{expert}.{name}_proj.weight"] = weight[expert].clone()
                tensors[f"experts.{expert}.{name}_proj.bias"] = bias[expert].clone()
    elif layout == "stacked":
        tensors = {"gate_up_proj": torch.cat((GATE, UP), 1), "gate_up_proj_bias": torch.cat((GATE_BIAS, UP_BIAS), 1)}
        tensors |= {"down_proj": DOWN, "down_proj_bias": DOWN_BIAS}
    else:
        both = torch.stack((GATE, UP), 2).flatten(1, 2), torch.stack((GATE_BIAS, UP_BIAS), 2).flatten(1, 2)
        tensors = {"gate_up_proj": both[0].transpose(1, 2), "gate_up_proj_bias": both[1]}
        tensors |= {"down_proj": DOWN.transpose(1, 2), "down_proj_bias": DOWN_BIAS}
    if layout != "modules":
        tensors = {f"experts.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model.safetensors")
    return SafetensorsSource(Checkpoint.open(directory))


def load(source: Any, layout: str, group: RankGroup | None = None, **settings: Any) -> Experts:
    layers = LayerFactory(dtype="float32", device="cpu", group=group, stored=source.names, **settings)
    as_gpt_oss = layout == "as gpt-oss"
    experts = layers.experts(
        "experts", HIDDEN, INNER, EXPERTS, TOP_K, bias=True, transposed=as_gpt_oss, interleaved=as_gpt_oss
    )
    load_weights(layers, source)
    return experts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """The result of one rank, token by token."""
    rows = []
    for x, chosen, weights in zip(X, ROUTING.experts.tolist(), ROUTING.weights, strict=True):
        results = [
            DOWN[e] @ (torch.nn.functional.silu(GATE[e] @ x + GATE_BIAS[e]) * (UP[e] @ x + UP_BIAS[e])) + DOWN_BIAS[e]
            for e in chosen
        ]
        rows.append(torch.stack(results).mul(weights[:, None]).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("layout", ["modules", "stacked", "as gpt-oss"])
def test_layouts_give_the_same_experts_on_one_rank_and_several(
    layout: str, tmp_path: Path, alone: torch.Tensor
) -> None:
    source = checkpoint(tmp_path, layout)
    torch.testing.assert_close(load(source, layout)(X, ROUTING).addend, alone, atol=1e-4, rtol=1e-5)
    for by_expert in (False, True):
        total = torch.zeros_like(X)
        for rank in range(2):
            experts = load(source, layout, LoneRank(rank, 2), expert_parallel=by_expert)
            mine = experts.spec.rank_experts
            chosen = ROUTING.experts - mine.start
            chosen = chosen.masked_fill((chosen < 0) | (chosen >= len(mine)), -1)
            total += experts(X, Routing(chosen, ROUTING.weights)).addend
            assert experts.nbytes == sum(t.nbytes for t in (GATE, UP, DOWN, GATE_BIAS, UP_BIAS)) // 2 + (
                DOWN_BIAS.nbytes // (2 if by_expert else 1)
            )
        torch.testing.assert_close(total, alone, atol=1e-4, rtol=1e-5)


def test_experts_on_a_gpu_without_triton_compute_the_same(tmp_path: Path, alone: torch.Tensor) -> None:
    """There each expert computes every token; the same code runs on a CPU here."""
    experts = load(checkpoint(tmp_path, "stacked"), "stacked")
    kernel = experts.kernel
    assert isinstance(kernel, PlainExperts)
    found = kernel.without_host(X, ROUTING, experts.weights, experts.bias)
    torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-5)


def test_experts_of_16_bits_are_multiplied_with_few_numbers_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(tmp_path, "stacked")
    layers = LayerFactory(dtype="bfloat16", device="cpu", stored=source.names)
    experts = layers.experts("experts", HIDDEN, INNER, EXPERTS, TOP_K, bias=True)
    load_weights(layers, source)
    assert layers.packed_shapes == {(2 * INNER, HIDDEN), (HIDDEN, INNER)}
    multiply, seen = matmul._multiply, set()

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.add(x.shape[0])
        return multiply(x, weight, bias)

    monkeypatch.setattr(matmul, "_multiply", noted)
    for tokens in range(33, 97):
        routing = Routing(torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1))
        assert experts(torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16), routing).addend.shape == (tokens, HIDDEN)
    assert seen == {matmul.padded_rows(tokens) for tokens in range(33, 97)}


def test_packed_weights_of_quantized_experts_are_counted(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "stacked")
    quant = Fp8.from_checkpoint(None, None)
    experts = load(source, "stacked", quant=quant)
    assert experts.packed_shapes == ({(2 * INNER, HIDDEN), (HIDDEN, INNER)} if can_pack(torch.empty(1, 1)) else set())


SPARSE = SparseMLPSpec(
    norm="norm",
    eps=1e-6,
    router="gate",
    experts="experts",
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    routing=RoutingSpec(num_experts=EXPERTS, top_k=TOP_K),
    shared=SharedExpertSpec(name="shared", intermediate_size=8, gate="shared_gate"),
)


@pytest.mark.interpreter
@pytest.mark.parametrize("rows", [1, 3])
def test_fused_sparse_mlp_computes_what_the_plain_one_does(rows: int) -> None:
    found = []
    for fused in (False, True):
        layers = LayerFactory(dtype="float32", device="cpu", fused=fused)
        block = layers.sparse_mlp(SPARSE)
        load_weights(layers, DummySource(seed=1))
        result, residual = block(X[:rows].clone(), X[:rows] * 0.5)
        found.append((result.reduce(), residual))
    for plain, fused_one in zip(*found, strict=True):
        torch.testing.assert_close(fused_one, plain, atol=1e-5, rtol=1e-5)


def test_shared_expert_without_a_gate_is_added_as_it_is() -> None:
    from attrs import evolve

    ungated = evolve(SPARSE, shared=SharedExpertSpec(name="shared", intermediate_size=8))
    without = evolve(SPARSE, shared=None)
    results = []
    for spec in (ungated, without):
        layers = LayerFactory(dtype="float32", device="cpu")
        block = layers.sparse_mlp(spec)
        load_weights(layers, DummySource(seed=1))
        results.append(block(X, None)[0].reduce())
        if spec is ungated:
            assert block._shared is not None
            shared = block._shared(block._norm(X, None)[0])
    torch.testing.assert_close(results[0], results[1] + shared)


class Kernel(PlainExperts):
    """A plugin's kernel that returns what the test chose."""

    __module__ = "mine"
    result: Any = None

    def apply(self, *arguments: Any) -> Any:
        return self.result


class Method(QuantMethod[None]):
    """A plugin's method; `made` is what it makes of experts."""

    api = "2"
    made: Any = Kernel

    @classmethod
    def refuses(cls, checkpoint: Any, device: Any) -> None:
        return None

    @classmethod
    def from_checkpoint(cls, checkpoint: Any, options: None) -> Method:
        return cls()

    def linear(self, spec: Any) -> LinearKernel | None:
        return None

    def experts(self, spec: Any) -> ExpertsKernel | None:
        made: ExpertsKernel | None = self.made(spec)
        return made


def test_wrong_result_of_a_plugins_kernel_is_a_fault_that_names_the_layer(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "stacked")
    checks = ResultChecks()
    experts = load(source, "stacked", quant=Method(), owners={"quant": "quant 'mine'"})
    experts.check_results(checks)
    with pytest.raises(StepFaultError, match=r"quant 'mine' returned a wrong result from apply\(\) of experts: None"):
        experts(X, ROUTING)
    checks.end()
    assert experts(X, ROUTING).addend is None


def test_experts_of_a_plugin_that_are_no_kernel_are_refused(tmp_path: Path) -> None:
    class Wrong(Method):
        made = staticmethod(lambda spec: 7)

    with pytest.raises(PluginError, match=r"returned 7 from experts\(\) of experts, not an ExpertsKernel or None"):
        load(checkpoint(tmp_path, "stacked"), "stacked", quant=Wrong())


def test_activation_that_a_plugins_experts_do_not_compute_is_refused() -> None:
    class OnlySilu(PlainExperts):
        activations = ("silu",)

    class Wrong(Method):
        made = OnlySilu

    layers = LayerFactory(dtype="float32", device="cpu", quant=Wrong(), owners={"quant": "quant 'mine'"})
    layers.experts("experts", HIDDEN, INNER, EXPERTS, TOP_K)
    with pytest.raises(
        ConfigError, match="quant 'mine' computes experts with silu, and this model's experts have gelu"
    ):
        layers.experts("experts", HIDDEN, INNER, EXPERTS, TOP_K, activation="gelu")


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    layers = LayerFactory(dtype="float32", device="cpu", group=LoneRank(0, 3), expert_parallel=True)
    with pytest.raises(ConfigError, match="3 ranks cannot share 4 experts evenly"):
        layers.experts("experts", HIDDEN, INNER, EXPERTS, TOP_K)


def test_method_that_quantizes_linear_layers_alone_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OnlyLinears(Method):
        experts = QuantMethod.experts

        def linear(self, spec: Any) -> Any:
            from engine.core.layers import PlainKernel

            return PlainKernel(spec)

    with caplog.at_level(logging.WARNING):
        load(checkpoint(tmp_path, "stacked"), "stacked", quant=OnlyLinears(), owners={"quant": "quant 'mine'"})
    assert "quant 'mine' quantizes linear layers but not experts" in caplog.text


@pytest.mark.parametrize("top_k", [0, 5])
def test_routing_refuses_more_experts_per_token_than_there_are(top_k: int) -> None:
    with pytest.raises(CheckpointError, match=f"{top_k} experts per token, and a layer has 4"):
        RoutingSpec(num_experts=4, top_k=top_k)
