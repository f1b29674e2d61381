"""A plugin's linear kernel whose results are checked: what a linear layer calls in a runner's first steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import evolve

from engine.core.plugin_host.faults import PluginCall
from engine.core.plugin_host.result_checks import Check, ResultChecks, describe, tensor_error
from engine.core.quant.base import FusedInputQuantization, LinearKernel, LinearSpec, QuantizedActivation


class CheckedKernel:
    """The methods of a LinearKernel that compute, each with a check of its result."""

    def __init__(self, kernel: LinearKernel, spec: LinearSpec, checks: ResultChecks, layer: PluginCall) -> None:
        """layer: the plugin, and the name of the layer."""
        outputs = sum(spec.rank_outputs(part) for part in spec.parts)
        self.apply = _checked(kernel, "apply", _result_check(spec, outputs), checks, layer)
        self.apply_gated = _checked(kernel, "apply_gated", _result_check(spec, outputs // 2), checks, layer)


class CheckedFusedInputQuantization:
    """The methods of a FusedInputQuantization, each with a check of its result."""

    def __init__(
        self, fused: FusedInputQuantization, spec: LinearSpec, checks: ResultChecks, layer: PluginCall
    ) -> None:
        """layer: as for CheckedKernel."""
        outputs = sum(spec.rank_outputs(part) for part in spec.parts)

        def normed(result: object, x: torch.Tensor, *others: object) -> str | None:
            if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], QuantizedActivation)):
                return f"{describe(result)}, not a pair of a QuantizedActivation and the next residual"
            wrong = tensor_error(result[1], tuple(x.shape), (spec.dtype,), x.device)
            return wrong and f"as the next residual {wrong}"

        def summed_and_normed(result: object, addends: Sequence[torch.Tensor], *others: object) -> str | None:
            return normed(result, addends[0])

        def activated(result: object, *arguments: object) -> str | None:
            return None if isinstance(result, QuantizedActivation) else f"{describe(result)}, not a QuantizedActivation"

        def decided(result: object, *arguments: object) -> str | None:
            return None if isinstance(result, bool) else f"{describe(result)}, not True or False"

        self.reads_float32_norm_weight = fused.reads_float32_norm_weight
        self.has_row_tensors = fused.has_row_tensors
        self.row_tensors = _checked(fused, "row_tensors", partial(_row_tensors_error, spec), checks, layer)
        self.from_row_tensors = _checked(fused, "from_row_tensors", activated, checks, layer)
        self.supports_rows = _checked(fused, "supports_rows", decided, checks, layer)
        self.fuses_quantized_gating = _checked(fused, "fuses_quantized_gating", decided, checks, layer)
        self.norm_and_quantize = _checked(fused, "norm_and_quantize", normed, checks, layer)
        self.sum_norm_and_quantize = _checked(fused, "sum_norm_and_quantize", summed_and_normed, checks, layer)
        self.activate_and_quantize = _checked(fused, "activate_and_quantize", activated, checks, layer)
        self.apply = _checked(fused, "apply", _result_check(spec, outputs), checks, layer)
        gated = _result_check(spec, outputs // 2)
        self.apply_quantized_gated = _checked(fused, "apply_quantized_gated", gated, checks, layer)


def _checked(of: object, name: str, check: Check, checks: ResultChecks, layer: PluginCall) -> Callable[..., Any]:
    return checks.call(getattr(of, name), evolve(layer, call=f"{name}() of {layer.call}"), check)


def _result_check(spec: LinearSpec, outputs: int) -> Check:
    """The check of a result with this many columns."""

    def check(result: object, x: torch.Tensor | QuantizedActivation, *others: object) -> str | None:
        rows = tuple(x.shape[:-1]) if isinstance(x, torch.Tensor) else (None,)
        return tensor_error(result, (*rows, outputs), (spec.dtype,), torch.device(spec.device))

    return check


def _row_tensors_error(spec: LinearSpec, result: object, made: QuantizedActivation) -> str | None:
    """What is wrong with the result of `row_tensors`."""
    if not isinstance(result, Sequence) or not result:
        return f"{describe(result)}, not a sequence of one or more tensors"
    nbytes = 0
    for tensor in result:
        if not isinstance(tensor, torch.Tensor) or not tensor.dim() or tensor.device != torch.device(spec.device):
            return f"{describe(tensor)}, not a tensor of [rows, ...] on {spec.device}"
        if len(tensor) != len(result[0]):
            return f"tensors of {len(result[0])} and of {len(tensor)} rows"
        nbytes += tensor.nbytes
    most = 2 * spec.rank_inputs * len(result[0])
    return f"tensors of {nbytes} bytes, more than the {most} of their rows in 16 bits" if nbytes > most else None
