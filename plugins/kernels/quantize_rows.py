"""Activations to eight-bit codes with scales, in one pass over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.core.kernels.launch import dependent_launch, release, wait

GROUP = 128
"""Inputs that share a scale, where a row has several."""
LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
TINY = tl.constexpr(1e-30)
"""Smallest scale computed, of zeros only; one over it is finite."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a small float32 to an integer, ties to even."""


@triton.jit
def _quantize_kernel(
    codes,
    scales,
    x,
    given,
    inputs,
    LIMIT: tl.constexpr,
    INT8: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    GIVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has a row, seen as [GROUPS, SIZE]; each group has a scale. GIVEN: all have the one at `given`."""
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = column < inputs
    scale = tl.full([GROUPS], 1.0, tl.float32)
    if GIVEN:
        scale *= tl.load(given)
    wait(PDL)
    values = tl.load(x + row * inputs + column, mask=inside, other=0.0).to(tl.float32)
    # int8 has no code for a NaN or infinity: the scale says it for all of the row.
    broken = (values != values) | (tl.abs(values) == float("inf"))
    values = tl.where(broken, 0.0, values)
    if not GIVEN:
        peak = tl.max(tl.abs(values), axis=1)
        scale = tl.maximum(tl.div_rn(peak, tl.full([GROUPS], LIMIT, tl.float32)), TINY)
    code = values * tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), scale)[:, None]
    code = tl.where(code > LIMIT, LIMIT, tl.where(code < -LIMIT, -LIMIT, code))
    if INT8:
        code = (code + ROUND) - ROUND
    tl.store(codes + row * inputs + column, code.to(codes.dtype.element_ty), mask=inside)
    scale = tl.where(tl.max(broken.to(tl.int32), axis=1) > 0, float("nan"), scale)
    count = tl.cdiv(inputs, SIZE)
    tl.store(scales + row * count + group, scale, mask=group < count)


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, *, grouped: bool = False, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [rows, inputs], dense -> codes of `dtype`, and scales: [rows] float32, if grouped [rows, ceil(inputs / 128)].

    scale: [1] float32, the scale of all rows, known beforehand; codes beyond the type's range are clamped. Without it a
    row's (or group's) largest number gets the largest code. A row with a NaN or infinity gets a NaN for scale.
    """
    rows, inputs = x.shape
    codes = torch.empty((rows, inputs), dtype=dtype, device=x.device)
    groups = -(-inputs // GROUP)
    scales = torch.empty((rows, groups) if grouped else (rows,), dtype=torch.float32, device=x.device)
    if rows:
        _quantize_kernel[(rows,)](
            codes,
            scales,
            x,
            scales if scale is None else scale,
            inputs,
            LIMIT=LIMITS[dtype],
            INT8=dtype == torch.int8,
            GROUPS=triton.next_power_of_2(groups) if grouped else 1,
            SIZE=GROUP if grouped else triton.next_power_of_2(inputs),
            GIVEN=scale is not None,
            num_warps=min(max(triton.next_power_of_2(inputs) // 1024, 1), 16),
            **dependent_launch(x.device),
        )
    return codes, scales
