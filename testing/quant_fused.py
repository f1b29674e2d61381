"""The part of QuantConformance for fused input quantization: compares it with the separate steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch
import torch.nn.functional as F

from engine.core.layers import Linear, silu_and_mul
from engine.core.quant import FusedInputQuantization
from engine.testing.stored_layers import ROWS, Make, StoredLayers

EPS = 1e-6


class FusedInputConformance:
    """Tests of `LinearKernel.fused_input_quantization`, skipped for a method whose kernels have none."""

    if TYPE_CHECKING:
        device: ClassVar[str]
        inputs: ClassVar[int]
        stored: Callable[[Path], StoredLayers]
        one: Callable[[str], Make]
        x: Callable[..., torch.Tensor]
        _close: Callable[..., None]

    @pytest.mark.parametrize("rows", ROWS)
    def test_fused_input_quantization(self, tmp_path: Path, rows: int) -> None:
        """Fused input quantization computes what the separate steps compute."""
        layer = self.stored(tmp_path).load(self.one("a"))
        fused = layer.kernel.fused_input_quantization()
        if fused is None or not fused.supports_rows(rows):
            pytest.skip(f"no fused input quantization of {rows} rows")
        with torch.inference_mode():
            self._check_fused_input_quantization(layer, fused, rows)

    def _check_fused_input_quantization(self, layer: Linear, fused: FusedInputQuantization, rows: int) -> None:
        x, up = self.x(rows), self.x(rows, seed=2)
        norm_weight = torch.linspace(0.5, 1.5, self.inputs, device=self.device).to(x.dtype)
        for residual in (None, self.x(rows, seed=1)):
            total = x if residual is None else x + residual
            normed = F.rms_norm(total, (self.inputs,), norm_weight, EPS)
            made, found = fused.norm_and_quantize(x.clone(), residual, norm_weight, EPS, layer.weights)
            what = f"{rows} rows {'without' if residual is None else 'with'} a residual"
            self._close(found, total.double().cpu(), f"the sum of {what}", 0.0)
            y = fused.apply(made, layer.weights, None)
            self._close(y, layer(normed).double().cpu(), f"the norm of {what}")
            for count in (2, 4):
                addends = [x, up, *(self.x(rows, seed=seed) for seed in (3, 4))][:count]
                self._check_sum(layer, fused, addends, residual, norm_weight)
        if fused.has_row_tensors and rows > 1:
            self._check_row_tensors(layer, fused, x, norm_weight)
        gated = torch.cat((x, up), -1)
        y = fused.apply(fused.activate_and_quantize(gated, layer.weights), layer.weights, None)
        self._close(y, layer(silu_and_mul(gated)).double().cpu(), f"the activation of {rows} rows")

    def _check_row_tensors(
        self, layer: Linear, fused: FusedInputQuantization, x: torch.Tensor, norm_weight: torch.Tensor
    ) -> None:
        """Rows that two ranks quantized are those that one quantizes, in memory that the caller gives."""
        rows = len(x)
        whole, _ = fused.norm_and_quantize(x.clone(), None, norm_weight, EPS, layer.weights)
        expected = fused.apply(whole, layer.weights, None)
        parts = []
        for part in (x[: rows // 2], x[rows // 2 :]):
            made, _ = fused.norm_and_quantize(part.clone(), None, norm_weight, EPS, layer.weights)
            parts.append(fused.row_tensors(made))
            counts = [len(tensor) for tensor in parts[-1]]
            assert set(counts) == {len(part)}, f"row_tensors() of {len(part)} rows are of {counts} rows"
        together = [torch.cat([part.contiguous() for part in same]) for same in zip(*parts, strict=True)]
        y = fused.apply(fused.from_row_tensors(together), layer.weights, None)
        self._close(y, expected.double().cpu(), f"{rows} rows quantized in two parts")

    def _check_sum(
        self,
        layer: Linear,
        fused: FusedInputQuantization,
        addends: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
    ) -> None:
        """The addends of several ranks are added as by operations of their own, and not overwritten."""
        theirs, ours = (None if residual is None else residual.clone() for _ in range(2))
        summed = addends[0].float()
        for addend in addends[1:]:
            summed = summed + addend
        made, total = fused.norm_and_quantize(summed.to(addends[0].dtype), theirs, norm_weight, EPS, layer.weights)
        expected = fused.apply(made, layer.weights, None)
        given = [addend.clone() for addend in addends]
        made, found = fused.sum_norm_and_quantize(given, ours, norm_weight, EPS, layer.weights)
        what = f"{len(addends)} addends"
        self._close(found, total.double().cpu(), f"the sum of {what}", 0.0)
        self._close(fused.apply(made, layer.weights, None), expected.double().cpu(), f"the norm of {what}")
        for one, addend in zip(given, addends, strict=True):
            self._close(one, addend.double().cpu(), f"one of {what} after the call", 0.0)
