"""Large tensors in a CPU's memory, which the kernel gives out when they are first written.

numpy asks for huge pages, with which filling fresh memory takes the kernel less than half the time, and gets zeroed
memory from the kernel, which zeroes it on first use. torch does neither: it writes its zeros, so that they take space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 64
"""Of a tensor, bytes: a cache line, as torch aligns."""


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, zeroed: bool = False) -> torch.Tensor:
    """A contiguous tensor in memory of its own: zero, or whatever was there."""
    size = math.prod(shape) * dtype.itemsize
    memory = (np.zeros if zeroed else np.empty)(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(tuple(shape))
