"""Eight-bit numbers with scales: from float tensors and back.

Three ways to share the scales of a weight [out, in]: "tensor", one, [1]; "channel", one an output, [out, 1]; "block",
one for 128 outputs x 128 inputs, [ceil(out / 128), ceil(in / 128)], the last ones of each side smaller. A number is its
code times its scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.ops.common.limits import max_quantized

BLOCK = 128
"""Outputs, and inputs, that share a scale of a block."""
FP8 = torch.float8_e4m3fn
TINY = 1e-30
"""Smallest scale, of zeros only."""
AT_ONCE = 2**24
"""Numbers that are widened to float32 at once."""


def quantize(weight: torch.Tensor, dtype: torch.dtype, granularity: str) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [out, in] of a float type -> codes of `dtype`, and scales, float32, as the module says.

    Needs memory for the codes and for a few times AT_ONCE numbers in float32.
    """
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    whole = _scale(_peak(weight), dtype) if granularity == "tensor" else None
    scales = []
    for rows in _strips(weight):
        strip = weight[rows].float()
        if whole is not None:
            scale = wide = whole
        elif granularity == "channel":
            scale = wide = _scale(strip.abs().amax(1, keepdim=True), dtype)
        else:
            scale = _scale(_block_peaks(strip), dtype)
            wide = expand(scale, strip.shape)
        scales.append(scale)
        codes[rows] = encode(strip / wide, dtype)
    return codes, whole if whole is not None else torch.cat(scales)


def encode(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The codes nearest to float32 numbers, which are clamped to max_quantized; ties go to the even code."""
    limit = max_quantized(dtype)
    values = values.clamp(-limit, limit)
    return (values.round_() if dtype == torch.int8 else values).to(dtype)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block_rows: int = BLOCK) -> torch.Tensor:
    """Codes [out, in] and scales -> the weight in `dtype`, rounded once. block_rows: outputs a block has."""
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for rows in _strips(codes):
        strip = codes[rows].float()
        if scale.numel() == 1:
            part = scale.reshape(1).float()
        elif scale.shape == (codes.shape[0], 1):
            part = scale[rows].float()
        else:
            part = expand(scale[rows.start // block_rows : -(-rows.stop // block_rows)], strip.shape, block_rows)
        weight[rows] = strip.mul_(part)
    return weight


def expand(scale: torch.Tensor, shape: torch.Size, block_rows: int = BLOCK) -> torch.Tensor:
    """Scales of blocks -> one for every number of a weight of this shape, float32."""
    wide = scale.float().repeat_interleave(block_rows, 0)[: shape[0]]
    return wide.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def quantize_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [rows, in] -> int8 codes, and their scales, float32: [1] if given, else one a row, [rows, 1].

    A row with a NaN or infinity has such a scale.
    """
    wide = x.float()
    if scale is not None:
        return encode(wide / scale, torch.int8), scale
    scale = (wide.abs().amax(1, keepdim=True) / max_quantized(torch.int8)).clamp_min_(TINY)
    return (wide / scale).round_().to(torch.int8), scale


def static_scale(max_abs: float, dtype: torch.dtype) -> float:
    """The scale of values up to max_abs in size, known beforehand."""
    return max(max_abs, 1e-12) / max_quantized(dtype)


def _scale(peaks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (peaks / max_quantized(dtype)).clamp_min(TINY)


def _peak(weight: torch.Tensor) -> torch.Tensor:
    low, high = weight.aminmax()
    return torch.maximum(-low, high).float().reshape(1)


def _block_peaks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = weight.new_zeros((rows * BLOCK, columns * BLOCK))
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3))


def _strips(weight: torch.Tensor) -> Iterator[slice]:
    """Rows at once: whole blocks, about AT_ONCE numbers."""
    step = max(1, AT_ONCE // (weight.shape[1] * BLOCK)) * BLOCK
    return (slice(start, min(start + step, weight.shape[0])) for start in range(0, weight.shape[0], step))
