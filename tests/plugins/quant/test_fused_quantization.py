"""Fused input quantization: results equal those of separate kernels, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import Engine, SamplingParams
from engine.core.layers import LayerFactory
from engine.core.quant.base import LinearPart, LinearSpec, QuantizedActivation
from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.activation.act_and_mul_quantize import act_and_mul_quantize
from engine.ops.activation.quantize_rows import Scaling, quantize_rows
from engine.ops.gemm import scaled_matmul
from engine.ops.gemm.skinny_launch import Workspace
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.norm.rms_norm import add_rms_norm
from engine.ops.norm.rms_norm_quantize import add_rms_norm_quantize
from engine.plugins.quant import (
    fused_quantization,
    w8_gpu,
    w8a8_matmul,
    w8a8_shape,
    w8a8_tiles,
)
from engine.plugins.quant.fp8 import Fp8
from engine.plugins.quant.int8 import Int8
from engine.plugins.quant.w8_gpu import DequantizeEachCallKernel, W8GpuKernel
from engine.plugins.quant.w8_kernel import W8Format
from engine.testing.checkpoints import make_checkpoint
from engine.testing.ranks import LoneRank
from tests.plugins.quant.conftest import w8a16_up_to

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = "bfloat16" if DEVICE.type == "cuda" else "float16"  # of which the interpreter can multiply matrices
HIDDEN, INTERMEDIATE = 136, 264


class W8OnGpu(Int8):
    """The GPU kernels, which Triton's interpreter runs on a CPU. Weights are int8: the interpreter rounds float8
    wrongly."""

    def linear(self, spec: Any) -> Any:
        return W8GpuKernel(spec, self.online(None), WeightOnlyMatmul(DEVICE))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Records the names of the quantizing kernels, in order."""
    names = []

    def noted(module: Any, name: Any) -> None:
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **more: names.append(name) or kernel(*given, **more))

    noted(w8a8_matmul, "quantize_rows")
    noted(fused_quantization, "add_rms_norm_quantize")
    noted(fused_quantization, "act_and_mul_quantize")
    return names


def make_mlp(
    *,
    group: Any = None,
    fused: bool = True,
    method: Any = W8OnGpu,
    hidden: Any = HIDDEN,
    intermediate: Any = INTERMEDIATE,
    activation: Any = "silu",
) -> Any:
    """Norm, gate and up, down, of one rank."""
    torch.manual_seed(0)
    quant = method.from_checkpoint(None, None)
    layers = LayerFactory(dtype=HALF, device=str(DEVICE), quant=quant, group=group, fused=fused)
    norm = layers.norm("norm", hidden, 1e-5)
    parts = [("gate", intermediate), ("up", intermediate)]
    gate_up = layers.linear(parts, hidden, bias=True, parallel="column", gated=True, activation=activation)
    down = layers.partial_linear("down", hidden, intermediate, input_activation=activation).linear
    for layer in layers.layers:
        loaded = {}
        for name, spec in layer.tensors().items():
            shape = list(spec.shape)
            if spec.shard_dim is not None:
                shape[spec.shard_dim] //= layers.ranks
            loaded[name] = torch.randn(shape, device=DEVICE)
        layer.fill(loaded)
    return norm, gate_up, down


def randn(*shape: Any) -> Any:
    return torch.randn(*shape, device=DEVICE).to(getattr(torch, HALF))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("static", [False, True])
def test_input_quantization_is_fused_for_many_rows(
    static: bool, ranks: int, launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w8a16_up_to(2, monkeypatch)
    norm, gate_up, down = make_mlp(group=None if ranks == 1 else LoneRank(1, ranks))
    if static:
        for layer in (gate_up, down):
            layer.weights = {**layer.weights, "input_scale": torch.tensor([0.02], device=DEVICE)}
    for rows in (0, 2, 3, 5):
        x, residual = randn(rows, HIDDEN), randn(rows, HIDDEN)
        launched.clear()
        normed, expected_total = norm(x, residual.clone())
        expected = down(gate_up.gated(normed))
        assert launched == ["quantize_rows"] * (2 if rows > 2 else 0)
        launched.clear()
        made, total = norm.quantized_for(gate_up, x, residual.clone())
        product = gate_up.gated_quantized_for(down, made)
        got = down(product)
        assert launched == (["add_rms_norm_quantize", "act_and_mul_quantize"] if rows > 2 else [])
        assert isinstance(made, QuantizedActivation) == isinstance(product, QuantizedActivation) == (rows > 2)
        assert torch.equal(total, expected_total)
        assert torch.equal(got, expected)
        if rows > 2:
            assert torch.equal(gate_up.gated(made), act_and_mul(gate_up(normed)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gating_is_fused_into_the_product_for_many_rows(
    activation: Any, launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the product, which needs wgmma."""

    def gated_matmul(*given: Any) -> torch.Tensor:
        launched.append("gated_matmul")
        *codes, activation = given
        tile = w8a8_tiles.MEDIUM_TILES[0]
        return act_and_mul(scaled_matmul.matmul(*codes, tile, Workspace(DEVICE)), activation)

    w8a16_up_to(2, monkeypatch)
    monkeypatch.setattr(w8a8_matmul, "MAX_ROWS_SEPARATE", 4)
    monkeypatch.setattr(w8a8_matmul, "gated_matmul", gated_matmul)
    norm, gate_up, down = make_mlp(activation=activation)
    assert not gate_up.kernel.fuses_gating(5) or DEVICE.type == "cuda"
    gate_up.kernel._w8a8._has_gated = True
    for rows in (4, 5):
        x = randn(rows, HIDDEN)
        normed, _ = norm(x)
        expected = act_and_mul(gate_up(normed), activation)
        for given in (normed, norm.quantized_for(gate_up, x)[0]):
            launched.clear()
            assert torch.equal(gate_up.gated(given), expected)
            assert ("gated_matmul" in launched) == (rows == 5)
            product = gate_up.gated_quantized_for(down, given)
            assert isinstance(product, QuantizedActivation) == (rows == 4)
            assert torch.equal(down(product), down(expected))


def test_gating_is_fused_from_a_number_of_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """More where torch's kernel is the alternative; none without wgmma, or where rows of the result are not aligned."""

    def rows(outputs: int, dtype: torch.dtype, *, wgmma: bool = True, scale_rows: int = 0) -> list[int]:
        monkeypatch.setattr(w8a8_shape, "has_wgmma", lambda device: wgmma)
        monkeypatch.setattr(w8a8_shape, "has_capability", lambda device, least: wgmma)
        workspace = Workspace(DEVICE)
        matmul = w8a8_matmul.W8A8Matmul(workspace, dtype, outputs, 128, torch.bfloat16, scale_rows=scale_rows)
        return [number for number in (33, 512, 513, 1024, 1025) if matmul.fuses_gating(number)]

    assert rows(272, torch.int8) == [513, 1024, 1025]
    assert rows(272, torch.float8_e4m3fn) == [1025]
    assert rows(264, torch.int8) == []
    assert rows(272, torch.int8, wgmma=False) == []
    assert rows(256, torch.float8_e4m3fn, scale_rows=128) == []


@pytest.mark.parametrize(
    ("inputs", "per_block", "has"), [(64, False, False), (72, False, True), (4096, False, True), (4096, True, False)]
)
def test_rows_have_tensors_of_their_own_if_these_are_small_and_have_a_scale_per_row(
    inputs: int, per_block: bool, has: bool
) -> None:
    scaling = Scaling(per_block=per_block)
    matmul = w8a8_matmul.W8A8Matmul(Workspace(DEVICE), torch.int8, 128, inputs, torch.bfloat16, scaling=scaling)
    assert fused_quantization.NormAndActivationQuantization(matmul, lambda rows: True).has_row_tensors == has


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "intermediate"), [(1024, 3072), (4096, 14336)])
@pytest.mark.parametrize("method", [Fp8, Int8])
def test_fused_quantization_in_a_cuda_graph_equals_separate_kernels(
    method: Any, hidden: int, intermediate: int
) -> None:
    norm, gate_up, down = make_mlp(method=method, hidden=hidden, intermediate=intermediate)
    for rows in (33, 64, 256, 1000, 1100):
        x, residual = randn(rows, hidden), randn(rows, hidden)

        def work(x: Any = x, residual: Any = residual) -> Any:
            made, total = norm.quantized_for(gate_up, x, residual.clone())
            return down(gate_up.gated_quantized_for(down, made)), total

        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got, total = work()
        x.copy_(randn(rows, hidden))
        graph.replay()
        normed, expected_total = norm(x, residual.clone())
        assert torch.equal(total, expected_total)
        assert torch.equal(got, down(gate_up.gated(normed)))


def test_plain_layers_do_not_fuse_input_quantization(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w8a16_up_to(2, monkeypatch)
    norm, gate_up, _ = make_mlp(fused=False)
    x = randn(3, HIDDEN)
    assert torch.equal(norm.quantized_for(gate_up, x)[0], norm(x)[0])
    assert not launched


def test_which_kernels_fuse_input_quantization(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(
        cls: Any = W8GpuKernel,
        activations: str = "token",
        granularity: str = "channel",
        dtype: Any = HALF,
        codes: str = "float8_e4m3fn",
    ) -> Any:
        spec = LinearSpec(
            parts=(LinearPart(name="a", out_features=16),), in_features=16, bias=False, dtype=dtype, device=str(DEVICE)
        )
        return cls(
            spec, W8Format(dtype=codes, granularity=granularity, activations=activations), WeightOnlyMatmul(DEVICE)
        )

    monkeypatch.setattr(w8_gpu, "has_tensor_cores_for", lambda device, dtype: True)
    for one in (kernel(), kernel(codes="int8"), kernel(activations="static"), kernel(granularity="block")):
        most = one.w8a16_max_rows
        assert [one.fused_input_quantization().supports_rows(rows) for rows in (0, most, most + 1)] == [
            False,
            False,
            True,
        ]
        assert [one.fuses_gating(rows) for rows in (0, most, most + 1)] == [True, True, False]
    tensors = [
        {"activations": "none"},
        {"dtype": "float32"},
        {"cls": DequantizeEachCallKernel},
    ]
    assert all(kernel(**changes).fused_input_quantization() is None for changes in tensors)
    monkeypatch.setattr(w8_gpu, "has_tensor_cores_for", lambda device, dtype: False)
    assert kernel().fused_input_quantization() is None


def test_activations_of_another_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    w8a16_up_to(2, monkeypatch)
    _, _, down = make_mlp()

    class Other(QuantizedActivation):
        pass

    with pytest.raises(TypeError, match="Other was made for another kernel; this one takes QuantizedRows"):
        down(Other())


def test_a_model_generates_the_same_with_and_without_fusion(
    tmp_path: Path, launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole engines, with and without fused input quantization."""
    w8a16_up_to(4, monkeypatch)
    path = make_checkpoint(tmp_path / "model", "qwen3", tokenizer=True, num_hidden_layers=2)
    settings = {"model__dtype": HALF, "cache__memory": "4MiB", "attention": "torch", "executor__kernels": "fused"}
    settings |= {"executor__graphs": "off", "executor__kernel_cache": str(tmp_path / "kernels"), "model__max_len": 32}
    settings |= {"scheduler__max_batch_tokens": 16, "scheduler__max_running": 2}
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompt = [(11 * place) % 500 for place in range(9)]
    found = []
    for fused_input_quantization, block in (
        (
            W8GpuKernel.fused_input_quantization,
            ["add_rms_norm_quantize", "quantize_rows", "add_rms_norm_quantize", "act_and_mul_quantize"],
        ),
        (lambda kernel: None, ["quantize_rows"] * 4),
    ):
        monkeypatch.setattr(W8GpuKernel, "fused_input_quantization", fused_input_quantization)
        with Engine(model=str(path), quant=W8OnGpu, executor__device=DEVICE.type, **settings) as engine:
            launched.clear()
            [done] = engine.generate([prompt], params)
        assert launched == block * 2  # of the prompt; a decode has few rows
        found.append((done.token_ids, [one.logprob for one in (*done.prompt_logprobs, *done.logprobs)]))
    assert found[0] == found[1]


@pytest.mark.parametrize("scaling", [Scaling(per_block=True), Scaling(per_block=True, powers_of_two=True)])
def test_fused_kernels_quantize_blocks_as_separate_kernels_do(scaling: Scaling) -> None:
    """Of int8, which the interpreter rounds as a GPU does: values and the scales of each 128 inputs."""
    torch.manual_seed(0)
    x, residual, weight = randn(5, HIDDEN), randn(5, HIDDEN), randn(HIDDEN)
    normed, total = add_rms_norm(x, residual.clone(), weight, 1e-5)
    expected = quantize_rows(normed, torch.int8, scaling=scaling)
    found = add_rms_norm_quantize(x, residual.clone(), weight, 1e-5, torch.int8, scaling=scaling)
    assert torch.equal(found[2], total)
    gated = randn(5, 2 * INTERMEDIATE)
    activated = quantize_rows(act_and_mul(gated), torch.int8, scaling=scaling)
    pairs = ((found[:2], expected), (act_and_mul_quantize(gated, torch.int8, scaling=scaling), activated))
    for (values, scales), (wanted, wanted_scales) in pairs:
        assert torch.equal(values, wanted)
        assert torch.equal(scales[:, :5], wanted_scales[:, :5])
