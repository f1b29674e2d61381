"""Linear layers with eight-bit weights on a GPU: which kernel for how many rows.

Few rows: reading the weights is all that counts. They are multiplied by activations as they are. More rows: activations
are quantized too, by one kernel, and codes multiplied by codes, which takes half the time of numbers of 16 bits. So
what is computed follows from the number of rows alone; by which tiles is measured at start (multiplications). With
scales of blocks, which have to be applied to sums of 128 products, that takes longer than by activations as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from engine.core.autotune import AutotunedCall, Operands
from engine.core.errors import CheckpointError
from engine.core.quant import FLOAT8_CAPABILITY, FusedInputQuantization, LinearSpec
from engine.ops.activation.silu_and_mul import silu_and_mul
from engine.ops.gemm.packed_layout import CodeLayout, PackedMatrix
from engine.ops.gemm.weight_only_launch import Multiplier
from engine.ops.gemm.weight_only_tiles import MOST_ROWS, GemmShape
from engine.plugins.quant.fused_quantization import NormAndActivationQuantization
from engine.plugins.quant.rounding import dequantize
from engine.plugins.quant.w8_kernel import NONE, W8Format, W8Kernel
from engine.plugins.quant.w8a8_matmul import HOPPER, W8A8Matmul, has_capability
from engine.plugins.quant.w8a8_tuning import ByCodes
from engine.plugins.quant.weight_only_tuning import WeightOnly

FEW_ROWS = 32
"""Up to so many rows activations are not quantized."""
NOT_A_NUMBER = 0x7F
"""The code of a NaN in e4m3, the sign aside."""


class W8GpuKernel(W8Kernel):
    """Codes in the order of a CodeLayout and scales in memory, kernels by the number of rows."""

    def __init__(self, spec: LinearSpec, form: W8Format, multiplier: Multiplier) -> None:
        super().__init__(spec, form)
        self._multiplier = multiplier
        self._layout = CodeLayout(dtype=form.dtype, scale_rows=self.scale_rows)
        slow_tiles = self.scale_rows > 0 or is_without_tma(torch.device(spec.device))
        self._quantizes = form.activations != NONE and not slow_tiles
        outputs = sum(spec.rank_outputs(part) for part in spec.parts)
        self._codes = W8A8Matmul(multiplier.workspace, form.torch_dtype, outputs, spec.rank_inputs, self.compute_dtype)
        self._last: tuple[Mapping[str, torch.Tensor], PackedMatrix] | None = None
        """The weights given last, and their matrix."""

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Codes and scales. Raises CheckpointError for float8 codes that are no numbers."""
        codes = self.merge(loaded)
        if codes.weight.dtype != torch.int8 and bool((codes.weight.view(torch.uint8) & 127 == NOT_A_NUMBER).any()):
            names = ", ".join(part.name for part in self.spec.parts)
            raise CheckpointError(f"the weights of {names} have a NaN; fetch the checkpoint again")
        given = {} if codes.input_scale is None else {"input_scale": codes.input_scale}
        return {"weight": self._layout.pack(codes.weight), "scale": codes.scale.contiguous(), **given}

    def apply(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        return self._multiply(x, weights, bias, gated=False)

    def apply_gated(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See LinearKernel."""
        return self._multiply(x, weights, bias, gated=True)

    def _multiply(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None, *, gated: bool
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if self.spec.dtype == "float32":  # of which the tensor cores would drop digits
            y = F.linear(flat, self.widen(weights, x.dtype, x.shape[-1]), bias)
            y = silu_and_mul(y) if gated else y
        elif self._by_codes(flat.shape[0]):
            y = self._codes(flat, weights, bias)
            y = silu_and_mul(y) if gated else y
        else:
            y = self._multiplier(flat, self._matrix(weights), bias, gated=gated)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _matrix(self, weights: Mapping[str, torch.Tensor]) -> PackedMatrix:
        """Kept, as a layer gives the same mapping, unchanged, at each call."""
        if self._last is None or self._last[0] is not weights:
            words = self._layout.words(weights["weight"])
            self._last = weights, PackedMatrix(words=words, scales=weights["scale"], layout=self._layout)
        return self._last[1]

    def fuses_gating(self, rows: int) -> bool:
        """See LinearKernel."""
        return not self._by_codes(rows)

    def fused_input_quantization(self) -> FusedInputQuantization | None:
        """Where there are rows whose activations are quantized."""
        can = self._quantizes and self.spec.dtype != "float32"
        return NormAndActivationQuantization(self._codes, self._by_codes) if can else None

    def _by_codes(self, rows: int) -> bool:
        """Whether so many rows are quantized, but for float32 ones."""
        return self._quantizes and rows > FEW_ROWS

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        """One of few rows and one of many, or one of all where activations are not quantized."""
        spec = self.spec
        if spec.dtype == "float32":
            return ()
        matrix = self._matrix(weights)
        problem = GemmShape(
            gated=spec.gated,
            weight_rows=matrix.rows,
            inputs=spec.rank_inputs,
            layout=self._layout,
            dtype=self.compute_dtype,
        )
        most_rows = FEW_ROWS if self._quantizes else MOST_ROWS
        few = WeightOnly(self._multiplier, problem, most_rows)
        found = [AutotunedCall(op=few, operands=Operands(weights=matrix.tensors, bias=bias))]
        if self._quantizes:
            many = ByCodes(self._codes, static="input_scale" in weights)
            found.append(AutotunedCall(op=many, operands=Operands(weights=weights, bias=bias)))
        return found

    def widen(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, inputs: int) -> torch.Tensor:
        """Codes and scales, as kernels here keep them -> the weight, [outputs, inputs]."""
        scale = weights["scale"] if self.scale_rows else weights["scale"][:, None]
        return dequantize(self._layout.unpack(weights["weight"], inputs), scale, dtype, self.scale_rows)

    def describe(self) -> str:
        """See W8Kernel."""
        if not self._quantizes:
            return (
                f"weight-only Triton kernels, more than {MOST_ROWS} rows by unpacked weights; activations as they are"
            )
        few = f"up to {FEW_ROWS} rows weight-only Triton kernels"
        how = "per token" if self.form.activations == "token" else "by a stored scale"
        return f"{few}, more with activations quantized {how}, on the tensor cores"

    def slow(self) -> str | None:
        """Why this will not be fast, if it will not."""
        return "activations are float32; use --dtype bfloat16" if self.spec.dtype == "float32" else None


class DequantizeEachCallKernel(W8GpuKernel):
    """For GPUs without float8: weights are widened at every multiplication."""

    def fused_input_quantization(self) -> FusedInputQuantization | None:
        """None: activations are not quantized."""
        return None

    def autotuned_calls(
        self, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> Sequence[AutotunedCall]:
        """None: there is one way."""
        return ()

    def _multiply(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None, *, gated: bool
    ) -> torch.Tensor:
        y = F.linear(x, self.widen(weights, x.dtype, x.shape[-1]), bias)
        return silu_and_mul(y) if gated else y

    def describe(self) -> str:
        """See W8Kernel."""
        return f"weight-only: widened to {self.spec.dtype} at every multiplication"

    def slow(self) -> str | None:
        """See W8GpuKernel."""
        return (
            f"this GPU has no float8 (compute capability below {FLOAT8_CAPABILITY[0]}.{FLOAT8_CAPABILITY[1]}): weights"
            " take less memory but multiplying takes longer; an int8 checkpoint would be faster"
        )


def is_without_tma(device: torch.device) -> bool:
    """Whether the kernel that multiplies codes by codes would load its tiles without overlap."""
    return device.type == "cuda" and not has_capability(device, HOPPER)
