"""What a plugin's kernel returns is checked until the checks end; a wrong result names plugin, method and layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from engine.core.errors import StepFaultError
from engine.core.layers.linear import Linear, PlainKernel
from engine.core.plugin_host.result_checks import ResultChecks
from engine.core.quant.base import FusedInputQuantization, LinearPart, LinearSpec, QuantizedActivation

X = torch.ones(2, 4)


class Quantized(QuantizedActivation):
    """Holds the input as it is."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Fused(FusedInputQuantization):
    """Quantizes nothing, and returns what the contract says."""

    def supports_rows(self, rows: int) -> bool:
        return True

    def norm_and_quantize(self, x: Any, residual: Any, norm_weight: Any, eps: float, weights: Any) -> Any:
        return Quantized(x), x

    def activate_and_quantize(self, x: torch.Tensor, weights: Any) -> QuantizedActivation:
        return Quantized(x[:, :4])

    def apply(self, made: Any, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        return made.x @ weights["weight"].T

    def fuses_quantized_gating(self, made: Any) -> bool:
        return True

    def apply_quantized_gated(self, made: Any, weights: Any, bias: Any) -> torch.Tensor:
        return made.x @ weights["weight"].T[:, :3]

    has_row_tensors = True

    def row_tensors(self, made: Any) -> Any:
        return [made.x.half()]

    def from_row_tensors(self, tensors: Any) -> Any:
        return Quantized(tensors[0].float())


class Kernel(PlainKernel):
    """A plugin's kernel, which computes a gated layer in one pass."""

    fused: FusedInputQuantization = Fused()

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"weight": torch.cat(list(loaded.values()))}

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        return x @ weights["weight"].T

    def apply_gated(self, x: torch.Tensor, weights: Any, bias: Any) -> torch.Tensor:
        return x @ weights["weight"].T[:, :3]

    def fused_input_quantization(self) -> FusedInputQuantization:
        return self.fused


def make(checks: ResultChecks, members: Mapping[str, Any] = {}, fused: Mapping[str, Any] = {}) -> Linear:
    """A gated layer of 4 inputs and twice 3 outputs whose kernel has these methods."""
    spec = LinearSpec(
        parts=(LinearPart(name="gate", out_features=3), LinearPart(name="up", out_features=3)),
        in_features=4,
        bias=False,
        dtype="float32",
        gated=True,
    )
    kernel: Any = type("Changed", (Kernel,), {**members, "fused": type("ChangedFused", (Fused,), dict(fused))()})
    linear = Linear(spec, kernel(spec), owner="quant 'mine' of mine 1.0")
    linear.fill({"gate.weight": torch.ones(3, 4), "up.weight": torch.ones(3, 4)})
    linear.check_results(checks)
    return linear


CALLS: dict[str, Callable[[Linear, Any], Any]] = {
    "apply": lambda linear, fused: linear(X),
    "apply_gated": lambda linear, fused: linear.gated(X),
    "fused apply": lambda linear, fused: linear(Quantized(X)),
    "fuses_quantized_gating": lambda linear, fused: linear.gated(Quantized(X)),
    "apply_quantized_gated": lambda linear, fused: linear.gated(Quantized(X)),
    "supports_rows": lambda linear, fused: linear.fused_input_quantization(X),
    "norm_and_quantize": lambda linear, fused: fused().norm_and_quantize(X, None, X[0], 1e-6, linear.weights),
    "sum_norm_and_quantize": lambda linear, fused: fused().sum_norm_and_quantize(
        (X, X), None, X[0], 1e-6, linear.weights
    ),
    "row_tensors": lambda linear, fused: fused().row_tensors(Quantized(X)),
    "from_row_tensors": lambda linear, fused: fused().from_row_tensors([X.half()]),
    "activate_and_quantize": lambda linear, fused: fused().activate_and_quantize(X.repeat(1, 2), linear.weights),
}
"""Method -> how a layer, or the layer before, comes to call the method."""


def call(linear: Linear, name: str) -> Any:
    return CALLS[name](linear, lambda: linear.fused_input_quantization(X))


@pytest.mark.parametrize("name", CALLS)
def test_right_results_pass_and_the_methods_are_the_kernel_s_own_after_the_checks(name: str) -> None:
    checks = ResultChecks()
    linear = make(checks)
    call(linear, name)
    checks.end()
    call(linear, name)
    assert linear._apply == linear.kernel.apply
    assert linear._apply_gated == linear.kernel.apply_gated
    assert linear._apply_gated_quantized == linear.kernel.fused_input_quantization().apply_quantized_gated
    assert linear.fused_input_quantization(X) is linear.kernel.fused_input_quantization()


@pytest.mark.parametrize("reads", [False, True])
def test_checked_methods_say_what_the_kernel_s_own_say_of_norm_weights(reads: bool) -> None:
    linear = make(ResultChecks(), fused={"reads_float32_norm_weight": reads})
    fused = linear.fused_input_quantization(X)
    assert fused is not None
    assert fused.reads_float32_norm_weight == reads


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("apply", X, r"apply\(\) of gate: a tensor of \[2, 4\] float32 on cpu, not of \[2, 6\] float32 on cpu"),
        ("apply", None, r"apply\(\) of gate: None, not a tensor of \[2, 6\]"),
        ("apply_gated", torch.ones(2, 6), r"apply_gated\(\) of gate: a tensor of \[2, 6\] .* not of \[2, 3\]"),
        ("fused apply", torch.ones(2, 6).half(), r"apply\(\) of gate: .* float16 on cpu, not of \[any, 6\] float32"),
        ("fuses_quantized_gating", None, r"fuses_quantized_gating\(\) of gate: None, not True or False"),
        (
            "apply_quantized_gated",
            torch.ones(2, 6),
            r"apply_quantized_gated\(\) of gate: a tensor of \[2, 6\] .* not of \[any, 3\]",
        ),
        ("supports_rows", None, r"supports_rows\(\) of gate: None, not True or False"),
        ("norm_and_quantize", X, r"norm_and_quantize\(\) of gate: a tensor of \[2, 4\] float32 on cpu, not a pair of"),
        ("norm_and_quantize", (Quantized(X), None), r"norm_and_quantize\(\) of gate: as the next residual None, not"),
        (
            "sum_norm_and_quantize",
            X,
            r"sum_norm_and_quantize\(\) of gate: a tensor of \[2, 4\] float32 on cpu, not a pair",
        ),
        (
            "activate_and_quantize",
            X,
            r"activate_and_quantize\(\) of gate: a tensor of \[2, 4\] .* not a QuantizedActivation",
        ),
        ("row_tensors", X.half(), r"row_tensors\(\) of gate: a tensor of \[2, 4\] float16 on cpu, not a sequence of"),
        (
            "row_tensors",
            (),
            r"row_tensors\(\) of gate: an object of class tuple, not a sequence of one or more tensors",
        ),
        ("row_tensors", [X.half(), None], r"row_tensors\(\) of gate: None, not a tensor of \[rows, ...\] on cpu"),
        (
            "row_tensors",
            [X[:, 0], X[0, 0]],
            r"row_tensors\(\) of gate: a tensor of \[\] float32 on cpu, not a tensor of",
        ),
        ("row_tensors", [X[:, 0], X[:1, 0]], r"row_tensors\(\) of gate: tensors of 2 and of 1 rows"),
        (
            "row_tensors",
            [X],
            r"row_tensors\(\) of gate: tensors of 32 bytes, more than the 16 of their rows in 16 bits",
        ),
        ("from_row_tensors", X, r"from_row_tensors\(\) of gate: a tensor of \[2, 4\] .* not a QuantizedActivation"),
    ],
)
def test_a_wrong_result_names_plugin_method_and_layer(name: str, answer: object, message: str) -> None:
    changed = {name.removeprefix("fused "): lambda self, *arguments: answer}
    checks = ResultChecks()
    linear = make(checks, changed) if name in ("apply", "apply_gated") else make(checks, fused=changed)
    with pytest.raises(StepFaultError, match=rf"^quant 'mine' of mine 1.0 returned a wrong result from {message}"):
        call(linear, name)
