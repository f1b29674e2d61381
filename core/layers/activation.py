"""Activation functions."""

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. x: [..., 2 * size], gate before up -> [..., size]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
