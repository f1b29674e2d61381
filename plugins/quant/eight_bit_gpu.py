"""Linear layers with eight-bit weights on a GPU: which kernel for how many rows.

Few rows: reading the weights is all that counts. They are multiplied by activations as they are. More rows: activations
are quantized too, by one kernel, and codes multiplied by codes, which takes half the time of numbers of 16 bits. With
scales of blocks, which have to be applied to sums of 128 products, that takes longer than by activations as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F

from engine.core.errors import CheckpointError
from engine.core.kernels.activation import silu_and_mul
from engine.core.kernels.launch import num_sms
from engine.core.quant import LinearSpec
from engine.plugins.kernels.quantize_rows import quantize_rows
from engine.plugins.kernels.scaled_matmul import MatmulTile, matmul
from engine.plugins.kernels.weight_only_launch import MOST_ROWS, Multiplier
from engine.plugins.quant.eight_bit import NONE, EightBitFormat, EightBitKernel
from engine.plugins.quant.layout import CodeLayout
from engine.plugins.quant.rounding import dequantize

FEW_ROWS = 32
"""Up to so many rows activations are not quantized."""
SOME_ROWS = 64
"""Up to so many rows tiles have as many."""
SMALL_TILES = (
    MatmulTile(rows=SOME_ROWS, outputs=32, warps=4, stages=6),
    MatmulTile(rows=SOME_ROWS, outputs=64, warps=4, stages=5),
)
MIDDLE_TILES = (
    MatmulTile(rows=128, outputs=64, warps=4, stages=6),
    MatmulTile(rows=128, outputs=128, warps=8, stages=4),
)
LARGE_TILE = MatmulTile(rows=128, outputs=256, warps=8, stages=4)
"""The fastest, or nearly, of those that benchmarks/quant_kernels.py --tune tries, on an H200."""
TORCH_TILE = 128 * 128
"""From this size of a tile on torch's float8 kernel is faster than ours."""
FAST_ACCUMULATION = True
"""Whether torch's float8 kernel may add up products within the tensor cores only, with fewer digits."""
FP8_CAPABILITY = (8, 9)
HOPPER = (9, 0)
"""From which on there is TMA, and torch's float8 kernel takes a scale a row."""
NOT_A_NUMBER = 0x7F
"""The code of a NaN in e4m3, the sign aside."""


class GpuKernel(EightBitKernel):
    """Codes in the order of a CodeLayout and scales in memory, kernels by the number of rows."""

    def __init__(self, spec: LinearSpec, form: EightBitFormat, multiplier: Multiplier) -> None:
        super().__init__(spec, form)
        self._multiplier = multiplier
        self._layout = CodeLayout(dtype=form.dtype, scale_rows=self.scale_rows)
        slow_tiles = self.scale_rows > 0 or is_without_tma(torch.device(spec.device))
        self._quantizes = form.activations != NONE and not slow_tiles

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
        elif not self._quantizes or flat.shape[0] <= FEW_ROWS:
            words = self._layout.words(weights["weight"])
            y = self._multiplier(flat, words, weights["scale"], self._layout, bias, gated=gated)
            return y.view(*x.shape[:-1], y.shape[-1])
        else:
            y = self._by_codes(flat, weights, bias)
        y = silu_and_mul(y) if gated else y
        return y.view(*x.shape[:-1], y.shape[-1])

    def _by_codes(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight, scale = weights["weight"], weights["scale"]
        codes, x_scale = quantize_rows(x, weight.dtype, scale=weights.get("input_scale"))
        tile = matmul_tile(x.shape[0], weight.shape[0], num_sms(x.device))
        if tile.rows * tile.outputs >= TORCH_TILE and self._is_for_torch(weight, x.dtype):
            return self._by_torch(codes, x_scale, weight, scale, bias, x.dtype)
        return matmul(codes, x_scale, weight, scale, bias, x.dtype, tile)

    @staticmethod
    def _by_torch(
        codes: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return torch._scaled_mm(
            codes,
            weight.t(),
            scale_a=x_scale[:, None],
            scale_b=scale[None, :],
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=FAST_ACCUMULATION,
        )

    @staticmethod
    def _is_for_torch(weight: torch.Tensor, dtype: torch.dtype) -> bool:
        return (
            weight.dtype != torch.int8
            and dtype == torch.bfloat16
            and weight.shape[0] % 16 == 0
            and has_capability(weight.device, HOPPER)
        )

    def widen(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, inputs: int) -> torch.Tensor:
        """Codes and scales, as kernels here keep them -> the weight, [outputs, inputs]."""
        scale = weights["scale"] if self.scale_rows else weights["scale"][:, None]
        return dequantize(self._layout.unpack(weights["weight"], inputs), scale, dtype, self.scale_rows)

    def describe(self) -> str:
        """See EightBitKernel."""
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


def matmul_tile(rows: int, outputs: int, sms: int) -> MatmulTile:
    """The tile for a product of this size: small ones where large ones would leave multiprocessors idle."""
    if rows <= SOME_ROWS:
        return next((tile for tile in SMALL_TILES if tile.programs(rows, outputs) <= 2 * sms), SMALL_TILES[-1])
    return next((tile for tile in MIDDLE_TILES if tile.programs(rows, outputs) <= sms), LARGE_TILE)


class WideningKernel(GpuKernel):
    """For GPUs without float8: weights are widened at every multiplication."""

    def _multiply(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], bias: torch.Tensor | None, *, gated: bool
    ) -> torch.Tensor:
        y = F.linear(x, self.widen(weights, x.dtype, x.shape[-1]), bias)
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


def is_without_tma(device: torch.device) -> bool:
    """Whether the kernel that multiplies codes by codes would load its tiles without overlap."""
    return device.type == "cuda" and not has_capability(device, HOPPER)


@cache
def has_capability(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether a device is a GPU of at least this compute capability."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= least
