"""x W^T by the fastest means the device has.

On a CPU, oneDNN multiplies by a weight laid out for it in advance about twice as fast as torch's own linear does, from
one row to hundreds, because the layout suits both the vector registers and the order of reading. torch exposes this to
its compiler only; the operators are the same in torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROWS = 16
"""Rows of x that the layout is made for; others cost little more."""


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a layout of its own for a weight of this type and device."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not available:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out_features, in_features] -> the same for `multiply` alone, in the layout that is fastest there."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if can_pack(weight) else weight
    return packed


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [..., in_features], weight from `pack` -> x W^T + bias: [..., out_features]."""
    if weight.is_mkldnn:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)
