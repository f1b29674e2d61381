"""Linear layers with eight-bit weights on a GPU: which kernel for how many rows.

Few rows: reading the weights is all that counts. They are multiplied by activations as they are. More rows: activations
are quantized too, by one kernel, and codes multiplied by codes, which takes half the time of numbers of 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F

from engine.core.kernels.activation import silu_and_mul
from engine.core.quant import LinearSpec
from engine.plugins.kernels.quantize_rows import quantize_rows
from engine.plugins.kernels.scaled_matmul import MatmulTile, matmul
from engine.plugins.kernels.skinny8_launch import (
    MOST_VECTOR_TILE,
    VECTOR_ROWS,
    Launch,
    Problem,
    Workspace,
    default_tile,
)
from engine.plugins.quant.eight_bit import NONE, EightBitFormat, EightBitKernel
from engine.plugins.quant.rounding import dequantize

FEW_ROWS = 32
"""Up to so many rows activations are not quantized."""
FEW_ROWS_OF_SMALL = 64
"""The same of small weights, for which a kernel to quantize activations costs as much as it saves."""
SMALL = 2**23
"""Numbers that a small weight has at most."""
SOME_ROWS = 256
"""Up to so many rows codes are multiplied by the kernel that shares out columns of weights; beyond, by tiles."""
MATMUL_TILE = MatmulTile(rows=128, outputs=128, warps=8, stages=4)
"""For int8 codes, and float8 codes that torch's kernel does not take."""
MATMUL_TILE_BLOCKED = MatmulTile(rows=128, outputs=128, warps=8, stages=3)
"""For codes with scales of blocks, where sums are in registers twice."""
MATMUL_TILE_WIDENED = MatmulTile(rows=128, outputs=128, warps=8, stages=3, block_k=64)
"""For activations that are not quantized."""
FAST_ACCUMULATION = True
"""Whether torch's float8 kernel may add up products within the tensor cores only, with fewer digits."""
FP8_CAPABILITY = (8, 9)
HOPPER = (9, 0)
"""From which on there is TMA, and torch's float8 kernel takes a scale a row."""


def few_rows(weight_rows: int, inputs: int) -> int:
    """Up to how many rows activations are not quantized."""
    return FEW_ROWS_OF_SMALL if weight_rows * inputs <= SMALL else FEW_ROWS


class GpuKernel(EightBitKernel):
    """Codes and scales in memory, kernels by the number of rows."""

    def __init__(self, spec: LinearSpec, form: EightBitFormat, workspace: Workspace) -> None:
        super().__init__(spec, form)
        self._workspace = workspace
        self._launches: dict[tuple[int, bool, bool], Launch] = {}
        self._is_wide = spec.dtype == "float32"  # of which the tensor cores would drop digits
        self._most_wide = VECTOR_ROWS[-1] if self.scale_rows % MOST_VECTOR_TILE == 0 else 0

    def prepare(self, loaded: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Codes and scales."""
        codes = self.merge(loaded)
        given = {} if codes.input_scale is None else {"input_scale": codes.input_scale}
        return {"weight": codes.weight.contiguous(), "scale": codes.scale.contiguous(), **given}

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
        rows = flat.shape[0]
        weight, scale = weights["weight"], weights["scale"]
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        if rows == 0:
            return x.new_empty((*x.shape[:-1], outputs))
        most = self._most_wide if self._is_wide else few_rows(*weight.shape)
        quantized = self.form.activations != NONE and rows > most
        small = rows <= SOME_ROWS or weight.shape[1] % 16 != 0 or is_without_tma(weight.device)
        codes, x_scale = flat, None
        if quantized:
            blocks = self.scale_rows > 0
            codes, x_scale = quantize_rows(flat, weight.dtype, grouped=blocks, scale=weights.get("input_scale"))
        if self._is_wide and not quantized and rows > most:
            y = self._by_widening(flat, weights, bias)
        elif small:
            launch = self._launch(rows, weight, gated=gated, codes=quantized)
            y = launch(codes, weight, scale, bias, x.dtype, x_scale)
            return y.view(*x.shape[:-1], outputs)
        elif x_scale is not None and self._is_for_torch(weight, x.dtype):
            y = torch._scaled_mm(
                codes,
                weight.t(),
                scale_a=x_scale[:, None],
                scale_b=scale[None, :],
                bias=bias,
                out_dtype=x.dtype,
                use_fast_accum=FAST_ACCUMULATION,
            )
        else:
            y = matmul(codes, x_scale, weight, scale, bias, x.dtype, self._matmul_tile(quantized), self.scale_rows)
        return (silu_and_mul(y) if gated else y).view(*x.shape[:-1], outputs)

    def _launch(self, rows: int, weight: torch.Tensor, *, gated: bool, codes: bool) -> Launch:
        """Launches are made once for numbers of rows that share a kernel."""
        bucket = 1 << (rows - 1).bit_length()
        key = (bucket, gated, codes)
        if key not in self._launches:
            problem = Problem(
                weight_rows=weight.shape[0], inputs=weight.shape[1], scale_rows=self.scale_rows, gated=gated
            )
            tile = default_tile(problem, bucket, weight.device, codes=codes)
            self._launches[key] = Launch(problem, tile, bucket, self._workspace, codes=codes)
        return self._launches[key]

    def _is_for_torch(self, weight: torch.Tensor, dtype: torch.dtype) -> bool:
        return (
            weight.dtype != torch.int8
            and not self.scale_rows
            and dtype == torch.bfloat16
            and weight.shape[0] % 16 == 0
            and has_capability(weight.device, HOPPER)
        )

    def _matmul_tile(self, quantized: bool) -> MatmulTile:
        if not quantized:
            return MATMUL_TILE_WIDENED
        return MATMUL_TILE_BLOCKED if self.scale_rows else MATMUL_TILE

    def _by_widening(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(x, widen(weights, x.dtype, self.scale_rows), bias)

    def describe(self) -> str:
        """See EightBitKernel."""
        few = f"up to {FEW_ROWS} rows ({FEW_ROWS_OF_SMALL} of small layers) weight-only Triton kernels"
        if self.form.activations == NONE:
            return f"{few}, more by tiles, all with activations as they are"
        how = "per token" if self.form.activations == "token" else "by a stored scale"
        return f"{few}, more with activations quantized {how}, on the tensor cores"

    def slow(self) -> str | None:
        """Why this will not be fast, if it will not."""
        if self._is_wide:
            return "activations are float32; use --dtype bfloat16"
        if self.spec.in_features % 16:
            return f"{self.spec.in_features} inputs are no multiple of 16"
        return None


class WideningKernel(GpuKernel):
    """For GPUs without float8: weights are widened at every multiplication."""

    def _multiply(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None, *, gated: bool
    ) -> torch.Tensor:
        y = self._by_widening(x, weights, bias)
        return silu_and_mul(y) if gated else y

    def describe(self) -> str:
        """See EightBitKernel."""
        return f"weight-only: widened to {self.spec.dtype} at every multiplication"

    def slow(self) -> str | None:
        """See GpuKernel."""
        return (
            f"this GPU has no float8 (compute capability below {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}): weights take"
            " less memory but multiplying takes longer; an int8 checkpoint would be faster"
        )


def widen(weights: Mapping[str, torch.Tensor], dtype: torch.dtype, scale_rows: int) -> torch.Tensor:
    """Codes and scales, as kernels here keep them -> the weight."""
    scale = weights["scale"] if scale_rows else weights["scale"][:, None]
    return dequantize(weights["weight"], scale, dtype, scale_rows)


def is_without_tma(device: torch.device) -> bool:
    """Whether the kernel of tiles would load them without overlap: then the other takes all numbers of rows."""
    return device.type == "cuda" and not has_capability(device, HOPPER)


@cache
def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether a device is a GPU of at least this compute capability."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= least
