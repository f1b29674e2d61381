"""GPTQ (arXiv:2210.17323): rounds weights input by input, and compensates each error in the inputs that follow.

The output error of a linear layer is tr(D H D^T) for a change D of its weights and H = X^T X of its inputs X. When
input j is rounded with an error e_j, the best change of the inputs after it is -e_j / U_jj * U_j, with U the upper
Cholesky factor of H^-1 (equations 2 and 3, and section 3.3, step 3).
"""

from __future__ import annotations

import math

import torch

from engine.core.errors import CheckpointError
from engine.plugins.quant.w4a16 import QuantizedWeight
from engine.quantize.clipping import clip
from engine.quantize.grid import Grid, assemble

BLOCK = 128
"""Maximum number of inputs whose changes are applied to all later inputs in one product (section 3.3, step 2)."""


def gptq(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, group_size: int, *, act_order: str, damp: float
) -> QuantizedWeight:
    """weight: [outputs, inputs] float32; hessian: [inputs, inputs], X^T X times any number.

    act_order and damp: see Settings. With "weight" ranges are clipped (clipping.py); otherwise a group's scale is
    computed when its first input is rounded, from the weights as changed by then.
    Raises CheckpointError if the Hessian is not positive definite.
    """
    inputs = weight.shape[1]
    size = inputs if group_size == -1 else group_size
    hessian = hessian.double()
    seen = hessian.diagonal() > 0
    # An input that is always 0 changes no output; with a weight of 0 it does not widen its group.
    weight = torch.where(seen, weight, 0.0)
    order = torch.arange(inputs, device=weight.device)
    if act_order != "none":
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order], damp)

    fixed = act_order == "weight"  # scales of groups of adjacent inputs, needed before the first input is rounded
    scale = torch.zeros((weight.shape[0], inputs // size), device=weight.device)
    zero = torch.zeros_like(scale)
    if fixed:
        scale, zero = grid.fit(*clip(weight, hessian.float(), grid, group_size))
    group_at = order // size if fixed else torch.arange(inputs, device=weight.device) // size
    places = group_at.tolist()
    rest = weight[:, order]
    codes = torch.empty_like(rest)
    block = _block(size)
    for begin in range(0, inputs, block):
        end = min(begin + block, inputs)
        now = rest[:, begin:end]
        errors = torch.empty_like(now)
        for j in range(end - begin):
            place, group = begin + j, places[begin + j]
            if not fixed and place % size == 0:
                members = rest[:, place : place + size]
                scale[:, group], zero[:, group] = grid.fit(*members.aminmax(dim=1))
            column = now[:, j]
            code = grid.encode(column, scale[:, group], zero[:, group])
            error = (column - (code - zero[:, group]) * scale[:, group]) / factor[place, place]
            now[:, j:] -= error[:, None] * factor[place, place:end]
            codes[:, place], errors[:, j] = code, error
        rest[:, end:] -= errors @ factor[begin:end, end:]

    back = torch.argsort(order)
    group_of = group_at[back].to(torch.int32) if act_order == "group" and size < inputs else None
    return assemble(codes[:, back], scale, zero, grid, group_of)


def inverse_factor(hessian: torch.Tensor, damp: float) -> torch.Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, float32. Computed in float64, like its argument."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    diagonal[diagonal == 0] = 1.0
    diagonal += damp * mean
    lower, failed = torch.linalg.cholesky_ex(damped)
    if not bool(failed == 0):
        raise CheckpointError(
            "the activations of the calibration text give no positive definite Hessian; is one of them infinite or"
            f" NaN? Otherwise use more text, or a larger --damp than {damp}"
        )
    upper: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper.float()


def _block(size: int) -> int:
    """Inputs per block. Groups start where a block starts, or lie within one, so that their weights are up to date."""
    return BLOCK // size * size if size <= BLOCK else math.gcd(size, BLOCK)
