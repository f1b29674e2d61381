"""The W8 GPU kernels for all numbers of rows, against float64; in Triton's interpreter without a GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.core.errors import CheckpointError
from engine.core.quant.base import LinearPart, LinearSpec
from engine.ops.gemm import weight_only_tiles
from engine.ops.gemm.packed_layout import W8Layout
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.plugins.quant import w8a8_matmul
from engine.plugins.quant.fp8 import Fp8, Fp8Options
from engine.plugins.quant.int8 import Int8
from engine.plugins.quant.w8_gpu import DequantizeEachCallKernel, W8GpuKernel
from engine.plugins.quant.w8_kernel import W8Format
from engine.plugins.quant.w8a8_matmul import has_capability
from engine.plugins.quant.w8a8_tiles import ROW_CLASSES
from tests.plugins.quant.conftest import w8a16_up_to

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = "bfloat16" if DEVICE.type == "cuda" else "float16"  # of which the interpreter can multiply matrices
CODES = {"fp8": "float8_e4m3fn", "int8": "int8"}
PARTS = (("gate", 32), ("up", 32))
INPUTS = 272
LIMIT = 2**-6


def make(
    kind: Any,
    granularity: Any,
    activations: Any,
    *,
    parts: Any = PARTS,
    inputs: Any = INPUTS,
    dtype: Any = HALF,
    cls: Any = W8GpuKernel,
) -> Any:
    form = W8Format(dtype=CODES[kind], granularity=granularity, activations=activations)
    named = tuple(LinearPart(name=name, out_features=outputs) for name, outputs in parts)
    spec = LinearSpec(parts=named, in_features=inputs, bias=True, dtype=dtype, device=str(DEVICE))
    return cls(spec, form, WeightOnlyMatmul(DEVICE))


class Case:
    """A layer with random weights, its prepared tensors, and the float64 weight that they represent."""

    def __init__(self, kernel: Any, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.kernel = kernel
        self.dtype = getattr(torch, kernel.spec.dtype)
        loaded = {
            f"{part.name}.weight": torch.randn(part.out_features, kernel.spec.in_features, device=DEVICE)
            * (10.0 ** (i - 1))
            for i, part in enumerate(kernel.spec.parts)
        }
        self.weights = dict(kernel.prepare(loaded))
        self.bias = torch.randn(kernel.spec.out_features, device=DEVICE).to(self.dtype)
        layout = W8Layout(dtype=kernel.form.dtype)
        codes = layout.unpack(self.weights["weight"], kernel.spec.in_features).double()
        scale = self.weights["scale"].double()
        if kernel.scale_rows:
            row = torch.arange(codes.shape[0], device=DEVICE) // kernel.scale_rows
            column = torch.arange(codes.shape[1], device=DEVICE) // 128
            self.meant = codes * scale[row][:, column]
        else:
            self.meant = codes * scale[:, None]

    def inputs(self, rows: Any) -> Any:
        """Activations that are exact in float8 once scaled: the interpreter rounds others wrongly."""
        values = torch.randn(rows, self.kernel.spec.in_features, device=DEVICE).clamp(-3.5, 3.5) * 4
        values = values.to(torch.float8_e4m3fn).float()
        values[values.abs() < 2.0**-3] = 0
        values[:, ::128] = 14.0
        return (values / 16).to(self.dtype)

    def check(self, rows: Any, limit: Any = LIMIT) -> None:
        x = self.inputs(rows)
        y = F.linear(x.double(), self.meant, self.bias.double())
        gate, up = y.chunk(2, -1)
        for got, exact in (
            (self.kernel.apply(x, self.weights, self.bias), y),
            (self.kernel.apply_gated(x, self.weights, self.bias), F.silu(gate) * up),
        ):
            assert got.dtype == x.dtype
            assert got.shape == exact.shape
            assert float((got.double() - exact).norm() / exact.norm()) < limit


FORMS = [
    ("fp8", "tensor", "token"),
    ("fp8", "channel", "token"),
    ("fp8", "channel", "none"),
    ("fp8", "block", "token"),
    ("fp8", "block", "none"),
    ("int8", "channel", "token"),
    ("int8", "channel", "none"),
]


@pytest.mark.parametrize(("kind", "granularity", "activations"), FORMS[1:])
def test_all_numbers_of_rows_equal_float64(
    kind: Any, granularity: Any, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W8A16, W8A8, and dequantized weights."""
    w8a16_up_to(16, monkeypatch)
    monkeypatch.setattr(weight_only_tiles, "WEIGHT_ONLY_MAX_ROWS", 20)
    case = Case(make(kind, granularity, activations))
    for rows in (1, 9, 17, 41):
        case.check(rows)


@pytest.mark.parametrize(("kind", "granularity", "activations"), FORMS[2:])
def test_products_equal_float64_when_inputs_are_no_multiple_of_16(
    kind: Any, granularity: Any, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    w8a16_up_to(4, monkeypatch)
    case = Case(make(kind, granularity, activations, parts=(("gate", 10), ("up", 10)), inputs=150))
    for rows in (2, 5, 20):
        case.check(rows)


@pytest.mark.parametrize(("kind", "granularity", "activations"), FORMS[1:])
def test_float32_keeps_its_digits(kind: Any, granularity: Any, activations: Any) -> None:
    case = Case(make(kind, granularity, activations, dtype="float32"))
    for rows in (3, 9):
        case.check(rows, 1e-5)


def test_weights_are_dequantized_each_call_without_float8() -> None:
    for granularity in ("channel", "block"):
        Case(make("fp8", granularity, "token", cls=DequantizeEachCallKernel)).check(5)


def test_static_activations_are_clamped_to_their_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    w8a16_up_to(0, monkeypatch)
    for kind, most in (("fp8", 448.0), ("int8", 127.0)):
        case = Case(make(kind, "channel", "token"))
        case.weights["input_scale"] = torch.tensor([1 / 64], device=DEVICE)
        x = case.inputs(3)
        x[1] = 100.0
        exact = F.linear((x.double() * 64).round().clamp(-most, most) / 64 if kind == "int8" else
                         (x.double() * 64).clamp(-most, most) / 64, case.meant)  # fmt: skip
        got = case.kernel.apply(x, case.weights, None)
        assert float((got.double() - exact).norm() / exact.norm()) < LIMIT


def test_shapes_around_the_rows_are_kept() -> None:
    case = Case(make("int8", "channel", "token"))
    x = case.inputs(6)
    flat = case.kernel.apply(x, case.weights, None)
    assert torch.equal(case.kernel.apply(x.view(2, 3, INPUTS), case.weights, None), flat.view(2, 3, -1))
    assert case.kernel.apply(x[:0], case.weights, None).shape == (0, 64)
    assert case.kernel.apply_gated(x[:0], case.weights, None).shape == (0, 32)
    strided = torch.cat([x, x], 1)[:, :INPUTS]
    assert torch.equal(case.kernel.apply(strided, case.weights, None), flat)


def test_apply_multiplies_by_the_weights_it_is_given() -> None:
    """Also after other weights were passed to the same kernel."""
    kernel = make("int8", "channel", "token", parts=(("gate", 8), ("up", 8)))
    first, second = (Case(kernel, seed) for seed in (1, 2))
    for case in (first, first, second, first):
        case.check(1)


def test_apply_takes_no_rows_in_float32() -> None:
    kernel = make("fp8", "channel", "token", dtype="float32")
    case = Case(kernel)
    assert kernel.apply(torch.empty(0, INPUTS, device=DEVICE), case.weights, case.bias).shape == (0, 64)
    assert kernel.apply_gated(torch.empty(0, INPUTS, device=DEVICE), case.weights, case.bias).shape == (0, 32)


def test_a_cpu_has_no_compute_capability() -> None:
    assert not has_capability(torch.device("cpu"), (0, 0))


def test_nan_weights_are_refused() -> None:
    kernel = make("fp8", "channel", "token", parts=(("q_proj", 16),), inputs=32)
    form = W8Format(dtype="float8_e4m3fn", granularity="tensor", activations="token", scale_names=("weight_scale",))
    kernel = W8GpuKernel(kernel.spec, form, WeightOnlyMatmul(DEVICE))
    codes = torch.ones(16, 32, device=DEVICE).to(torch.float8_e4m3fn)
    loaded = {"q_proj.weight": codes, "q_proj.weight_scale": torch.ones(1, device=DEVICE)}
    kernel.prepare(loaded)
    codes.view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(CheckpointError, match="the weights of q_proj have a NaN"):
        kernel.prepare(loaded)


@pytest.mark.parametrize(
    ("dtype", "inputs", "capability", "words"),
    [
        ("float32", 32, True, "float32"),
        (HALF, 32, False, "compute capability below 8.9"),
        (HALF, 32, True, None),
    ],
)
def test_slow_paths_are_logged(
    dtype: Any,
    inputs: int,
    capability: bool,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(w8a8_matmul, "has_capability", lambda device, least: capability)
    caplog.set_level(logging.INFO)
    method = Fp8.from_checkpoint(None, Fp8Options(granularity="channel"))
    parts = (LinearPart(name="q", out_features=16),)
    # "meta" stands for a GPU: nothing is multiplied.
    spec = LinearSpec(parts=parts, in_features=inputs, bias=False, dtype=dtype, device="meta")
    kernels = [method.linear(spec), method.linear(spec)]
    assert isinstance(kernels[0], W8GpuKernel if capability else DequantizeEachCallKernel)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(caplog.records) - len(warnings) == 1
    assert len(warnings) == (words is not None)
    if words is not None:
        assert words in warnings[0]


REAL = [
    ((("q", 4096), ("k", 1024), ("v", 1024)), 4096),
    ((("o", 4096),), 4096),
    ((("gate", 14336), ("up", 14336)), 4096),
    ((("down", 4096),), 14336),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "granularity", "activations"), FORMS)
@pytest.mark.parametrize(("parts", "inputs"), REAL)
def test_layers_of_real_sizes_equal_float64(
    kind: Any, granularity: Any, activations: Any, parts: Any, inputs: Any
) -> None:
    case = Case(make(kind, granularity, activations, parts=parts, inputs=inputs))
    for rows in (1, 2, 4, 8, 16, 32, 33, 64, 128, 256, 257, 2048):
        case.check(rows, 0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [512, 640])
def test_every_candidate_with_scales_of_blocks_is_correct(inputs: int) -> None:
    """Torch's kernel too: of 5 blocks of inputs, where cuBLAS reads scales of 8, and of rows that are no multiple of
    4."""
    kernel = make("fp8", "block", "token", parts=(("gate", 256), ("up", 256)), inputs=inputs)
    case = Case(kernel)
    _, many = kernel.autotuned_calls(case.weights, case.bias)
    for row_class in ROW_CLASSES:
        x = case.inputs(row_class - 1)
        exact = F.linear(x.double(), case.meant, case.bias.double())
        for tile in many.op.candidates(row_class):
            y = many.op.run(tile, x, many.operands).double()
            assert float((y - exact).norm() / exact.norm()) < LIMIT, many.op.name(tile)


@pytest.mark.gpu
def test_products_in_float16_equal_float64_on_a_gpu() -> None:
    for kind, granularity, activations in FORMS:
        case = Case(make(kind, granularity, activations, dtype="float16"))
        for rows in (1, 40, 300):
            case.check(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [Fp8, Int8])
def test_a_captured_graph_replays_the_same_result(method: Any) -> None:
    spec = LinearSpec(
        parts=(LinearPart(name="gate", out_features=1024), LinearPart(name="up", out_features=1024)),
        in_features=1024,
        bias=False,
        dtype="bfloat16",
        device="cuda:0",
        gated=True,
    )
    kernel = method.from_checkpoint(None, None).linear(spec)
    weights = kernel.prepare(
        {f"{part.name}.weight": torch.randn(1024, 1024, device="cuda") / 32 for part in spec.parts}
    )
    for rows in (1, 8, 64, 100, 512):
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        expected = kernel.apply_gated(x, weights, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = kernel.apply_gated(x, weights, None)
        for _ in range(2):
            graph.replay()
            assert torch.equal(got, expected)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, kernel.apply_gated(x, weights, None))
