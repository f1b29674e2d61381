"""From the host to the device without waiting: arrays side by side in one copy, or one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

_ALIGNMENT = 16
"""Bytes; kernels read whole vectors."""
_DTYPES = {name: getattr(torch, name) for name in ("bool", "uint8", "int32", "int64", "float32", "float64")}


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The same arrays as tensors on `device`, in memory that is nobody else's.

    For a GPU they travel side by side in one pinned buffer, and the call returns before they arrive; work given to the
    stream afterwards finds them there. torch's allocator of pinned memory hands the buffer out again only once the copy
    is done.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array.copy()) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    bytes_ = staging.numpy()
    for start, array in zip(starts, arrays, strict=True):
        bytes_[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    sent = staging.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(_DTYPES[array.dtype.name]).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor on the device, without waiting for it.

    torch's allocator of pinned memory hands a block out again only once the copies that read it have ended, so the
    staging block needs no keeping here.
    """
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
