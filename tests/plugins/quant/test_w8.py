"""The methods' refusals, what they ask of the loader, how they merge and share, and what they say."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.layers import LayerFactory
from engine.core.layers.linear import PlainKernel
from engine.core.quant.base import LinearPart, LinearSpec, TensorSpec
from engine.plugins.quant.fp8 import Fp8, Fp8Options
from engine.plugins.quant.int8 import Int8

from .w8_packers import compressed, number

CPU = DeviceInfo(type="cpu")
CHANNEL = number("float", "channel")
TOKEN = number("float", "token", dynamic=True)
INT_CHANNEL = number("int", "channel")
INT_TOKEN = number("int", "token", dynamic=True)
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def linear(
    method: Any,
    parts: Any,
    inputs: Any,
    parallel: str = "none",
    bias: bool = False,
    dtype: str = "float32",
    ranks: int = 1,
) -> Any:
    named = tuple(LinearPart(name=name, out_features=outputs) for name, outputs in parts)
    spec = LinearSpec(parts=named, in_features=inputs, bias=bias, dtype=dtype, parallel=parallel, ranks=ranks)
    return method.linear(spec)


@pytest.mark.parametrize(
    ("method", "config", "words"),
    [
        (Fp8, {"quant_method": "gptq", "bits": 4}, ["gptq", "quantizing them again", "leave --quant out"]),
        (Int8, {"quant_method": "awq"}, ["awq", "leave --quant out"]),
        (Int8, {"quant_method": "fp8"}, ["fp8"]),
        (Fp8, {"bits": 4}, ["None"]),
        (Fp8, {"quant_method": "fp8", "fmt": "e5m2"}, ["fmt", "e5m2", "e4m3"]),
        (Fp8, {"quant_method": "fp8", "activation_scheme": "sometimes"}, ["activation_scheme", "sometimes"]),
        (Fp8, {"quant_method": "fp8", "weight_block_size": [64, 64]}, ["weight_block_size", "[64, 64]"]),
        (Fp8, {**BLOCKS, "activation_scheme": "static"}, ["weight_block_size", "dynamic"]),
        (Fp8, compressed("int-quantized", INT_CHANNEL, INT_TOKEN), ["int8", "--quant int8"]),
        (Int8, compressed("float-quantized", CHANNEL, TOKEN), ["float8", "--quant fp8"]),
        (Int8, compressed("pack-quantized", INT_CHANNEL, None), ["group_0", "pack-quantized"]),
        (Int8, compressed("int-quantized", {**INT_CHANNEL, "num_bits": 4}, None), ["4 bits"]),
        (Int8, compressed("int-quantized", {**INT_CHANNEL, "symmetric": False}, None), ["asymmetric"]),
        (Int8, compressed("int-quantized", INT_CHANNEL, {**INT_TOKEN, "symmetric": False}), ["asymmetric"]),
        (Int8, compressed("int-quantized", number("int", "group", group_size=64), INT_TOKEN), ["per group"]),
        (Fp8, compressed("float-quantized", number("float", "block", block_structure=[64, 128]), TOKEN), ["64, 128"]),
        (Fp8, compressed("float-quantized", CHANNEL, INT_TOKEN), ["activations are int8"]),
        (Fp8, compressed("float-quantized", CHANNEL, number("float", "channel")), ["have scales per channel"]),
        (Fp8, compressed("nvfp4-pack-quantized", {**CHANNEL, "num_bits": 4}, None), ["4 bits"]),
        (Fp8, compressed("mxfp8-quantized", CHANNEL, None), ["mxfp8-quantized"]),
    ],
)  # fmt: skip
def test_refuses_by_name_what_it_cannot_read(method: Any, config: Any, words: Any) -> None:
    refusal = method.refuses(config, CPU)
    assert refusal is not None
    for word in words:
        assert word in refusal
    with pytest.raises(CheckpointError):
        method.from_checkpoint(config, None)


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (Fp8, None),
        (Int8, None),
        (Fp8, BLOCKS),
        (Fp8, STATIC),
        (Fp8, compressed("float-quantized", CHANNEL, TOKEN)),
        (Fp8, compressed("float-quantized", number("float", "tensor"), number("float", "tensor", dynamic=True))),
        (Int8, compressed("int-quantized", INT_CHANNEL, INT_TOKEN)),
        (Int8, compressed("int-quantized", number("int", "tensor"), number("int", "tensor"))),
    ],
)
def test_accepts_supported_checkpoints(method: Any, config: Any) -> None:
    assert method.refuses(config, CPU) is None


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.plugins.quant.triton_refusal.find_spec", lambda name: None)
    assert Fp8.refuses(None, CPU) is None
    assert "install triton" in Fp8.refuses(None, DeviceInfo(type="cuda"))


@pytest.mark.parametrize(("parallel", "dims"), [("none", (None, None)), ("column", (0, 0)), ("row", (1, None))])
def test_channel_scales_are_sharded_with_their_outputs(parallel: str, dims: Any) -> None:
    method = Fp8.from_checkpoint(compressed("float-quantized", CHANNEL, TOKEN), None)
    tensors = linear(method, [("q", 8), ("k", 4)], 6, parallel).tensors()
    assert tensors["k.weight"] == TensorSpec(shape=(4, 6), dtypes=("float8_e4m3fn",), shard_dim=dims[0])
    assert (tensors["k.weight_scale"].shape, tensors["k.weight_scale"].shard_dim) == ((4, 1), dims[1])
    assert tensors.keys() == {"q.weight", "q.weight_scale", "k.weight", "k.weight_scale"}


@pytest.mark.parametrize(("parallel", "dim"), [("none", None), ("column", 0), ("row", 1)])
def test_block_scales_are_sharded_with_their_blocks(parallel: str, dim: int | None) -> None:
    tensors = linear(Fp8.from_checkpoint(BLOCKS, None), [("q", 300)], 130, parallel).tensors()
    assert tensors["q.weight_scale_inv"].shape == (3, 2)
    assert tensors["q.weight_scale_inv"].shard_dim == dim
    assert not tensors["q.weight_scale_inv"].optional


def test_tensor_scales_are_read_by_all_ranks() -> None:
    tensors = linear(Fp8.from_checkpoint(STATIC, None), [("q", 8)], 6, "column").tensors()
    scales = {name: spec for name, spec in tensors.items() if name != "q.weight"}
    assert scales.keys() == {"q.weight_scale", "q.weight_scale_inv", "q.input_scale", "q.activation_scale"}
    assert all(spec.shape == (1,) and spec.shard_dim is None and spec.optional for spec in scales.values())


def test_ranks_that_would_cut_blocks_are_refused() -> None:
    """Before anything is loaded."""
    method = Fp8.from_checkpoint(BLOCKS, None)
    with pytest.raises(CheckpointError, match=r"8 ranks cannot share q: .* 64 of its 512 outputs.* blocks of 128"):
        linear(method, [("q", 512)], 128, "column", ranks=8)
    with pytest.raises(CheckpointError, match=r"2 ranks cannot share q: .* 192 of its 384 inputs"):
        linear(method, [("q", 128)], 384, "row", ranks=2)
    assert linear(method, [("q", 64)], 128, "none", ranks=8)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_static_scale_is_the_largest_of_the_parts(kind: str) -> None:
    config = STATIC if kind == "fp8" else compressed("int-quantized", number("int", "tensor"), number("int", "tensor"))
    kernel = linear((Fp8 if kind == "fp8" else Int8).from_checkpoint(config, None), [("q", 2), ("k", 2)], 4)
    codes = torch.ones(2, 4).to(torch.float8_e4m3fn if kind == "fp8" else torch.int8)
    loaded = {"q.weight": codes, "k.weight": codes, "q.weight_scale": torch.ones(1), "k.weight_scale": torch.ones(1)}
    loaded |= {"q.input_scale": torch.tensor([0.5]), "k.input_scale": torch.tensor([0.25])}
    assert kernel.merge(loaded).input_scale.tolist() == [0.5]
    if kind == "int8":
        y = kernel.apply(torch.tensor([[0.7, 0.2, 1.0, 100.0]]), kernel.prepare(loaded), None)
        assert y.tolist() == [[(1 + 0 + 2 + 127) * 0.5] * 4]


def test_int8_sums_are_exact() -> None:
    kernel = linear(Int8.from_checkpoint(None, None), [("q", 5)], 4096)
    weights = kernel.prepare({"q.weight": torch.full((5, 4096), 127.0)})
    y = kernel.apply(torch.full((2, 4096), 127.0), weights, None)
    torch.testing.assert_close(y, torch.full((2, 5), 127.0 * 127 * 4096), rtol=1e-6, atol=0)


def test_a_nan_shows_in_its_row_only() -> None:
    for method in (Fp8, Int8):
        kernel = linear(method.from_checkpoint(None, None), [("q", 4)], 8)
        x = torch.ones(3, 8)
        x[1, 2] = float("nan")
        y = kernel.apply(x, kernel.prepare({"q.weight": torch.ones(4, 8)}), None)
        assert y.isnan().all(1).tolist() == [False, True, False]
        assert y.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_shows_in_its_row_with_a_static_scale(damage: float) -> None:
    config = compressed("int-quantized", number("int", "tensor"), number("int", "tensor"))
    kernel = linear(Int8.from_checkpoint(config, None), [("q", 4)], 8)
    loaded = {"q.weight": torch.ones(4, 8, dtype=torch.int8), "q.weight_scale": torch.ones(1)}
    weights = kernel.prepare({**loaded, "q.input_scale": torch.ones(1)})
    x = torch.ones(3, 8)
    x[1, 2] = damage
    y = kernel.apply(x, weights, None)
    assert y.isfinite().all(1).tolist() == [True, False, True]
    assert y.isfinite().any(1).tolist() == [True, False, True]


def test_quantizing_while_loading_asks_for_plain_weights() -> None:
    method = Fp8.from_checkpoint(None, Fp8Options(granularity="block", activations="none"))
    kernel = linear(method, [("q", 4)], 8, dtype="bfloat16")
    assert kernel.tensors() == {"q.weight": TensorSpec(shape=(4, 8), dtypes=("bfloat16", "float32", "float16"))}
    assert (kernel.form.granularity, kernel.form.activations) == ("block", "none")
    assert not method.ignored()


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor made, but for views of given ones."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in self._given:
                self.most = max(self.most, one.nbytes)
        return made


@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
def test_quantizing_while_loading_allocates_no_more_than_the_result(
    granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float weights of a layer are there once, as read; what is widened is a strip at a time."""
    monkeypatch.setattr("engine.plugins.quant.rounding.STRIP_NUMBERS", 128 * 256)
    method = Fp8.from_checkpoint(None, Fp8Options(granularity=granularity))
    kernel = linear(method, [("gate", 1024), ("up", 1024)], 256)
    loaded = {"gate.weight": torch.randn(1024, 256), "up.weight": torch.randn(1024, 256)}
    with LargestTensor(loaded.values()) as largest:
        codes = kernel.merge(loaded)
    assert largest.most == codes.weight.nbytes == 2048 * 256
    assert codes.scale.nbytes <= 2048 * 4


def test_the_computation_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    layers = LayerFactory(dtype="float32", device="cpu", quant=Int8.from_checkpoint(None, None))
    for index in range(3):
        layers.linear([(f"layers.{index}.q", 4)], 8)
    said = [record.message for record in caplog.records if record.levelno == logging.INFO]
    assert len(said) == 1
    assert "int8 weights per channel (quantized while loading): int8 products" in said[0]
    assert "layers.0.q" in said[0]


def test_unquantized_modules_use_cores_kernel() -> None:
    config = {"quant_method": "fp8", "ignored_layers": ["layers.0"]}
    layers = LayerFactory(dtype="float32", device="cpu", quant=Fp8.from_checkpoint(config, None))
    assert isinstance(layers.linear([("layers.0.q", 4)], 8).kernel, PlainKernel)
    assert not isinstance(layers.linear([("layers.1.q", 4)], 8).kernel, PlainKernel)
    assert "*.k_scale" in layers.ignored
    assert layers.linear([("layers.2.q", 4)], 8).spec.device == layers.device
