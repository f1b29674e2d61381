"""x W^T by the fastest means of the device.

On a CPU, oneDNN multiplies by a prepacked weight about twice as fast as F.linear, from one row to hundreds, because its
layout suits the vector registers and the order of reading. torch exposes prepacking to its compiler only; the operators
are the same in torch 2.11 to 2.13.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROWS = 16
"""Rows of x that weights are packed for; other numbers of rows cost little more."""


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs weights of this dtype on this device."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not available:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out_features, in_features] -> the weight for `multiply`, in oneDNN's layout where `can_pack`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if can_pack(weight) else weight
    return packed


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias: [..., out_features]. x: [..., in_features]; weight: from `pack`."""
    if weight.is_mkldnn:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)
