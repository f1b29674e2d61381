"""Where kernels run in these tests: on the GPU if there is one, else in Triton's interpreter on the CPU.

The interpreter multiplies bfloat16 matrices wrongly and rounds to float8 wrongly: on a CPU 16-bit numbers are float16,
and only numbers that float8 has are cast to it.
"""

from __future__ import annotations

import pytest
import torch

from engine.ops.common.launch import has_wgmma


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if not has_wgmma(device):
        pytest.skip("this GPU has no wgmma")
    return device


@pytest.fixture
def half(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
