"""Where kernels run in these tests: on the GPU if there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
