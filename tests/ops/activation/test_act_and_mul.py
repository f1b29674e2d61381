"""Activations of gated layers against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core.layers import gated_activation
from engine.core.quant import ACTIVATIONS
from engine.ops.activation.act_and_mul import ACTIVATIONS as KERNEL_ACTIVATIONS, act_and_mul

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # the interpreter cuts bfloat16 off


def check(shape: Any, dtype: Any, device: Any, activation: Any = "silu") -> None:
    x = (torch.randn(*shape, device=device) * 4).to(dtype)
    out = act_and_mul(x, activation)
    assert out.dtype == dtype
    exact = gated_activation(activation)(x.double())
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (2, 4000), (2, 3, 20), (0, 8)])
def test_act_and_mul_equals_float64(shape: Any, dtype: Any, device: torch.device) -> None:
    check(shape, dtype, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_float64(activation: str, device: torch.device) -> None:
    check((3, 400), torch.float32, device, activation)


def test_kernels_know_every_activation() -> None:
    assert tuple(KERNEL_ACTIVATIONS) == ACTIVATIONS


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_of_gate_or_up_stays(activation: str, device: torch.device) -> None:
    x = torch.tensor([[torch.nan, 1.0, 9.0, 1.0, torch.nan, 9.0]], device=device)
    for found in (act_and_mul(x, activation), gated_activation(activation)(x)):  # type: ignore[arg-type]
        assert found.isnan().tolist() == [[True, True, False]]


def test_large_numbers_do_not_overflow(device: torch.device) -> None:
    x = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 2.0, 3.0, 4.0]], device=device)
    assert torch.equal(act_and_mul(x), torch.tensor([[-0.0, -0.0, 600.0, 4e30]], device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 28672), (256, 6144), (8192, 28672)])
def test_act_and_mul_equals_float64_at_real_sizes(shape: Any, device: torch.device) -> None:
    check(shape, torch.bfloat16, device)
