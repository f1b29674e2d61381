"""Large tensors in CPU memory, which the operating system allocates when they are first written.

numpy asks for huge pages, with which the first write takes the operating system less than half the time. It also leaves
zeroing to the operating system, on first use. torch does neither: it writes zeros, which allocates all of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 64
"""Alignment of a tensor, bytes: a cache line, as in torch."""


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, zeroed: bool = False) -> torch.Tensor:
    """A contiguous tensor in new memory, zeroed or uninitialized."""
    size = math.prod(shape) * dtype.itemsize
    memory = (np.zeros if zeroed else np.empty)(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(tuple(shape))


def zeroed_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A contiguous tensor of zeros. On a CPU it takes no memory until it is written."""
    if torch.device(device).type == "cpu":
        return host_tensor(shape, dtype, zeroed=True)
    return torch.zeros(shape, dtype=dtype, device=device)
