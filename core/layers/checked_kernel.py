"""A plugin's linear kernel whose results are checked: what a linear layer calls in a runner's first steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class CheckedFusedInputQuantization(FusedInputQuantization):
    """A plugin's FusedInputQuantization, with a check of each result."""

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

        def activated(result: object, *arguments: object) -> str | None:
            return None if isinstance(result, QuantizedActivation) else f"{describe(result)}, not a QuantizedActivation"

        self._fused = fused
        self._norm_and_quantize = _checked(fused, "norm_and_quantize", normed, checks, layer)
        self._activate_and_quantize = _checked(fused, "activate_and_quantize", activated, checks, layer)
        self._apply = _checked(fused, "apply", _result_check(spec, outputs), checks, layer)

    def supports_rows(self, rows: int) -> bool:
        return self._fused.supports_rows(rows)

    def norm_and_quantize(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Mapping[str, torch.Tensor],
    ) -> tuple[QuantizedActivation, torch.Tensor]:
        made: tuple[QuantizedActivation, torch.Tensor] = self._norm_and_quantize(x, residual, norm_weight, eps, weights)
        return made

    def activate_and_quantize(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> QuantizedActivation:
        made: QuantizedActivation = self._activate_and_quantize(x, weights)
        return made

    def apply(
        self, made: QuantizedActivation, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        result: torch.Tensor = self._apply(made, weights, bias)
        return result


def _checked(of: object, name: str, check: Check, checks: ResultChecks, layer: PluginCall) -> Callable[..., Any]:
    return checks.call(getattr(of, name), evolve(layer, call=f"{name}() of {layer.call}"), check)


def _result_check(spec: LinearSpec, outputs: int) -> Check:
    """The check of a result with this many columns."""

    def check(result: object, x: torch.Tensor | QuantizedActivation, *others: object) -> str | None:
        rows = tuple(x.shape[:-1]) if isinstance(x, torch.Tensor) else (None,)
        return tensor_error(result, (*rows, outputs), (spec.dtype,), torch.device(spec.device))

    return check
