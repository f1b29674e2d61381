"""silu(gate) * up against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.ops.activation.silu_and_mul import silu_and_mul

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # the interpreter cuts bfloat16 off


def check(shape: Any, dtype: Any, device: Any) -> None:
    x = (torch.randn(*shape, device=device) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    out = silu_and_mul(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=TOLERANCE[dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (2, 4000), (2, 3, 20), (0, 8)])
def test_equals_float64(shape: Any, dtype: Any, device: torch.device) -> None:
    check(shape, dtype, device)


def test_large_numbers_do_not_overflow(device: torch.device) -> None:
    x = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 2.0, 3.0, 4.0]], device=device)
    assert torch.equal(silu_and_mul(x), torch.tensor([[-0.0, -0.0, 600.0, 4e30]], device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 28672), (256, 6144), (8192, 28672)])
def test_real_sizes(shape: Any, device: torch.device) -> None:
    check(shape, torch.bfloat16, device)
