"""W8 linear layers on a GPU: W8A16 for few rows, W8A8 for more.

With few rows the time is that of reading the weights, and activations stay 16-bit (W8A16). With more rows activations
are quantized too, by one kernel, and the GEMM is W8A8, at twice the rate of 16-bit numbers. The format, the GPU and the
number of rows decide which of the two computes, so results do not depend on autotuning, which only chooses tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from engine.core.autotune import AutotunedCall, Operands
from engine.core.errors import CheckpointError
from engine.core.quant import ACTIVATIONS, FLOAT8_CAPABILITY, FusedInputQuantization, LinearSpec
from engine.ops.activation.act_and_mul import act_and_mul
from engine.ops.activation.quantize_rows import Scaling
from engine.ops.gemm.packed_layout import PackedMatrix, W8Layout
from engine.ops.gemm.weight_only_launch import WeightOnlyMatmul
from engine.ops.gemm.weight_only_tiles import WEIGHT_ONLY_MAX_ROWS, WeightOnlyShape
from engine.plugins.quant.fused_quantization import NormAndActivationQuantization
from engine.plugins.quant.rounding import dequantize
from engine.plugins.quant.w8_kernel import NONE, W8Format, W8Kernel
from engine.plugins.quant.w8a8_matmul import W8A8Matmul, has_tensor_cores_for
from engine.plugins.quant.w8a8_tuning import W8A8Op
from engine.plugins.quant.weight_only_tuning import WeightOnlyOp

W8A16_MAX_ROWS = 32
"""Up to this many rows activations are not quantized."""
W8A16_MAX_ROWS_WGMMA = 8
"""The same where W8A8 has persistent tiles, which are faster than W8A16 from fewer rows on."""
FLOAT8_NAN = 0x7F
"""The bits of a NaN in e4m3, without the sign."""


class W8GpuKernel(W8Kernel):
    """Weights in a W8Layout, multiplied by a W8A16 or a W8A8 GEMM."""

    activations = ACTIVATIONS

    def __init__(self, spec: LinearSpec, form: W8Format, w8a16: WeightOnlyMatmul) -> None:
        super().__init__(spec, form)
        self._w8a16 = w8a16
        self._layout = W8Layout(dtype=form.dtype, scale_rows=self.scale_rows)
        self._quantizes = form.activations != NONE and has_tensor_cores_for(w8a16.device, form.torch_dtype)
        outputs = sum(spec.rank_outputs(part) for part in spec.parts)
        scaling = Scaling(
            per_block=self.scale_rows > 0,
            powers_of_two=form.powers_of_two,
            max_activation=form.max_activation or 0.0,
        )
        self._w8a8 = W8A8Matmul(
            w8a16.workspace,
            form.torch_dtype,
            outputs,
            spec.rank_inputs,
            self.compute_dtype,
            scale_rows=self.scale_rows,
            scaling=scaling,
        )
        self._last: tuple[Mapping[str, torch.Tensor], PackedMatrix] | None = None
        """The weights of the last call, and their matrix."""

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Quantized values in the W8Layout, and scales. Raises CheckpointError for NaN among float8 values."""
        merged = self.merge(loaded)
        if merged.weight.dtype != torch.int8 and bool((merged.weight.view(torch.uint8) & 127 == FLOAT8_NAN).any()):
            names = ", ".join(part.name for part in self.spec.parts)
            raise CheckpointError(f"the weights of {names} have a NaN; fetch the checkpoint again")
        static = {} if merged.input_scale is None else {"input_scale": merged.input_scale}
        scale = merged.scale.contiguous()
        library = self._w8a8.library_weights(scale) if self._quantizes else {}
        return {"weight": self._layout.pack(merged.weight), "scale": scale, **static, **library}

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        return self._multiply(x, weights, bias, gated=False)

    def apply_gated(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self._multiply(x, weights, bias, gated=True)

    def _multiply(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None, *, gated: bool
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if self.spec.dtype == "float32":  # tensor cores would lose digits of float32
            y = F.linear(flat, self.dequantize(weights, x.dtype, x.shape[-1]), bias)
            y = act_and_mul(y, self.spec.activation) if gated else y
        elif self._is_w8a8(flat.shape[0]):
            if gated and self._w8a8.fuses_gating(flat.shape[0]):
                y = self._w8a8.gated(flat, weights, bias, self.spec.activation)
            else:
                y = self._w8a8(flat, weights, bias)
                y = act_and_mul(y, self.spec.activation) if gated else y
        else:
            y = self._w8a16(flat, self._matrix(weights), bias, gated=gated, activation=self.spec.activation)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _matrix(self, weights: Mapping[str, torch.Tensor]) -> PackedMatrix:
        """The matrix of `weights`; kept from call to call, as a layer passes the same mapping each time."""
        if self._last is None or self._last[0] is not weights:
            packed = self._layout.as_words(weights["weight"])
            self._last = weights, PackedMatrix(packed=packed, scales=weights["scale"], layout=self._layout)
        return self._last[1]

    def fuses_gating(self, rows: int) -> bool:
        return not self._is_w8a8(rows) or self._w8a8.fuses_gating(rows)

    def fused_input_quantization(self) -> FusedInputQuantization | None:
        """For the numbers of rows that are W8A8."""
        spec = self.spec
        if not self._quantizes or spec.dtype == "float32":
            return None
        return NormAndActivationQuantization(self._w8a8, self._is_w8a8, spec.input_activation, spec.activation)

    @property
    def w8a16_max_rows(self) -> int:
        """Up to this many rows activations are not quantized, where those of more rows are."""
        return W8A16_MAX_ROWS_WGMMA if self._w8a8.shape.persistent else W8A16_MAX_ROWS

    def _is_w8a8(self, rows: int) -> bool:
        """Whether activations of this many rows are quantized, if they are not float32."""
        return self._quantizes and rows > self.w8a16_max_rows

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        """W8A16 for few rows and W8A8 for more, or W8A16 for all where activations are not quantized."""
        spec = self.spec
        if spec.dtype == "float32":
            return ()
        matrix = self._matrix(weights)
        shape = WeightOnlyShape(
            gated=spec.gated,
            weight_rows=matrix.rows,
            inputs=spec.rank_inputs,
            layout=self._layout,
            dtype=self.compute_dtype,
            activation=spec.activation,
        )
        max_rows = self.w8a16_max_rows if self._quantizes else WEIGHT_ONLY_MAX_ROWS
        w8a16 = WeightOnlyOp(self._w8a16, shape, max_rows)
        found = [AutotunedCall(op=w8a16, operands=Operands(weights=matrix.tensors, bias=bias))]
        if self._quantizes:
            w8a8 = W8A8Op(self._w8a8, static="input_scale" in weights)
            found.append(AutotunedCall(op=w8a8, operands=Operands(weights=weights, bias=bias)))
        return found

    def dequantize(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, inputs: int) -> torch.Tensor:
        """The weight as a plain matrix, [outputs, inputs]. weights: as `prepare` returned them."""
        scale = weights["scale"] if self.scale_rows else weights["scale"][:, None]
        return dequantize(self._layout.unpack(weights["weight"], inputs), scale, dtype, self.scale_rows)

    def describe(self) -> str:
        if not self._quantizes:
            return f"W8A16 by Triton kernels, above {WEIGHT_ONLY_MAX_ROWS} rows by dequantized weights and cuBLAS"
        return f"W8A16 up to {self.w8a16_max_rows} rows, above W8A8 with activations quantized {self.activation_scales}"

    def slow(self) -> str | None:
        return "activations are float32; use --dtype bfloat16" if self.spec.dtype == "float32" else None


class DequantizeEachCallKernel(W8GpuKernel):
    """For GPUs without float8: weights are dequantized at each call."""

    def fused_input_quantization(self) -> FusedInputQuantization | None:
        """None, as activations are not quantized."""
        return None

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        """Empty: there is one way to compute."""
        return ()

    def _multiply(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None, *, gated: bool
    ) -> torch.Tensor:
        y = F.linear(x, self.dequantize(weights, x.dtype, x.shape[-1]), bias)
        return act_and_mul(y, self.spec.activation) if gated else y

    def describe(self) -> str:
        return f"weights dequantized to {self.spec.dtype} at each call"

    def slow(self) -> str | None:
        capability = ".".join(map(str, FLOAT8_CAPABILITY))
        return (
            f"this GPU has no float8 (compute capability below {capability}): weights take less memory but multiplying"
            " takes longer; an int8 checkpoint would be faster"
        )
