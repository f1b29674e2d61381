"""Single instructions against torch, on a GPU; what stands for them in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from engine.ops.common.fast_math import reciprocal, round_both


@triton.jit
def _kernel(out, x, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    place = tl.arange(0, SIZE)
    number = tl.load(x + place)
    tl.store(out + place, reciprocal(number))
    left, right = round_both(number, -3.0 * number, DTYPE)
    tl.store(out + SIZE + place, left)
    tl.store(out + 2 * SIZE + place, right)


@pytest.mark.parametrize(
    ("dtype", "type_here"),
    [(torch.float16, tl.float16), pytest.param(torch.bfloat16, tl.bfloat16, marks=pytest.mark.gpu)],
)
def test_reciprocals_and_rounded_pairs(dtype: torch.dtype, type_here: Any, device: torch.device) -> None:
    x = torch.randn(256, device=device).abs() + 1e-3
    out = torch.empty(3, 256, device=device)
    _kernel[(1,)](out, x, SIZE=256, DTYPE=type_here)
    torch.testing.assert_close(out[0], 1 / x, rtol=2.5e-7, atol=0.0)
    assert torch.equal(out[1], x.to(dtype).float())
    assert torch.equal(out[2], (-3.0 * x).to(dtype).float())
