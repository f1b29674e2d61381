"""The largest quantized value of a dtype. Imports no Triton, so that code for a CPU can use it."""

from __future__ import annotations

import torch


def max_quantized(dtype: torch.dtype) -> float:
    """The largest quantized value: 448 for float8_e4m3fn, 127 for int8. Symmetric quantization uses -max to max."""
    return float(torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max)
