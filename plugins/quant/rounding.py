"""Quantizes float tensors to 8 bits with scales, and dequantizes them.

Granularities of a weight's scales, [out, in]: "tensor", one scale, [1]; "channel", one per output, [out, 1]; "block",
one per 128 outputs x 128 inputs, [ceil(out / 128), ceil(in / 128)], the last blocks smaller. A value is the quantized
value times its scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.ops.common.limits import max_quantized

BLOCK = 128
"""Outputs, and inputs, per block."""
FP8 = torch.float8_e4m3fn
TINY = 1e-30
"""The smallest scale, that of zeros."""
STRIP_NUMBERS = 2**24
"""Numbers converted to float32 at a time, which bounds temporary memory."""


def quantize(weight: torch.Tensor, dtype: torch.dtype, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [out, in], a float dtype -> quantized values of `dtype`, and scales, float32, as the module describes.

    Needs memory for the result and for a few times STRIP_NUMBERS numbers in float32.
    """
    quantized = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    whole = _scale(_max_abs(weight), dtype) if granularity == "tensor" else None
    scales = []
    for rows in _strips(weight):
        strip = weight[rows].float()
        if whole is not None:
            scale = expanded = whole
        elif granularity == "channel":
            scale = expanded = _scale(strip.abs().amax(1, keepdim=True), dtype)
        else:
            scale = _scale(_block_max_abs(strip), dtype)
            expanded = expand(scale, strip.shape)
        scales.append(scale)
        quantized[rows] = round_to(strip / expanded, dtype)
    return quantized, whole if whole is not None else torch.cat(scales)


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 numbers to the nearest quantized value, ties to even; clamped to +-max_quantized."""
    limit = max_quantized(dtype)
    values = values.clamp(-limit, limit)
    return (values.round_() if dtype == torch.int8 else values).to(dtype)


def dequantize(
    quantized: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block_rows: int = BLOCK
) -> torch.Tensor:
    """Quantized values [out, in] and scales -> the weight in `dtype`, rounded once. block_rows: outputs per block."""
    weight = torch.empty(quantized.shape, dtype=dtype, device=quantized.device)
    for rows in _strips(quantized):
        strip = quantized[rows].float()
        if scale.numel() == 1:
            part = scale.reshape(1).float()
        elif scale.shape == (quantized.shape[0], 1):
            part = scale[rows].float()
        else:
            part = expand(scale[rows.start // block_rows : -(-rows.stop // block_rows)], strip.shape, block_rows)
        weight[rows] = strip.mul_(part)
    return weight


def expand(scale: torch.Tensor, shape: torch.Size, block_rows: int = BLOCK) -> torch.Tensor:
    """Expand scales of blocks to one per number of a weight of this shape, float32."""
    expanded = scale.float().repeat_interleave(block_rows, 0)[: shape[0]]
    return expanded.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [rows, in] -> int8 values and their scales, [rows, 1] float32: `scale`, [1], if given, else one per row.

    A row with a NaN or infinity gets a scale that is not finite.
    """
    x = x.float()
    if scale is not None:
        finite = x.isfinite().all(1, keepdim=True)
        return round_to(x / scale, torch.int8), scale.where(finite, torch.nan)
    scale = (x.abs().amax(1, keepdim=True) / max_quantized(torch.int8)).clamp_min_(TINY)
    return (x / scale).round_().to(torch.int8), scale


def static_scale(max_abs: float, dtype: torch.dtype) -> float:
    """The scale of values whose maximum magnitude, max_abs, is known beforehand."""
    return max(max_abs, 1e-12) / max_quantized(dtype)


def _scale(max_abs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (max_abs / max_quantized(dtype)).clamp_min(TINY)


def _max_abs(weight: torch.Tensor) -> torch.Tensor:
    low, high = weight.aminmax()
    return torch.maximum(-low, high).float().reshape(1)


def _block_max_abs(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = weight.new_zeros((rows * BLOCK, columns * BLOCK))
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3))


def _strips(weight: torch.Tensor) -> Iterator[slice]:
    """Slices of rows: whole blocks, about STRIP_NUMBERS numbers each."""
    step = max(1, STRIP_NUMBERS // (weight.shape[1] * BLOCK)) * BLOCK
    return (slice(start, min(start + step, weight.shape[0])) for start in range(0, weight.shape[0], step))
