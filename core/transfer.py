"""Copies between host and device that do not make the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
"""Bytes; kernels read whole vectors."""
_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("bool", "uint8", "int32", "int64", "float32", "float64")}


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to `device`, all in one transfer; returns one tensor per array, in memory of its own.

    For a GPU the call returns before the transfer is done; kernels launched later on the same stream see the data.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array.copy()) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # torch's allocator of pinned memory reuses the buffer only after the copy from it is done.
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    bytes_ = staging.numpy()
    for start, array in zip(starts, arrays, strict=True):
        bytes_[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    sent = staging.to(device, non_blocking=True)
    whole: dict[np.dtype[Any], torch.Tensor] = {}
    found = []
    for start, array in zip(starts, arrays, strict=True):
        if (values := whole.get(array.dtype)) is None:
            values = whole[array.dtype] = sent.view(_DTYPES[array.dtype])
        begin = start // array.itemsize
        found.append(values[begin : begin + array.size].view(array.shape))
    return found


def tensor_to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` without waiting for the copy."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)  # the allocator keeps the block until it was copied
    return values.to(device)


class HostCopy:
    """Tensors in host memory that are complete once an event on the device has occurred."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """tensors: in host memory, written by the last work launched on `device`."""
        self._tensors = tuple(tensors)
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # A blocking event lets the waiting thread sleep; by default the driver would keep a core busy.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    @classmethod
    def begin(cls, *tensors: torch.Tensor) -> HostCopy:
        """Start copying tensors to the host, in stream order: work launched later may overwrite them.

        On a GPU the copies are pinned blocks of torch's caching allocator, which reuses a block only when this object
        is gone and the copy has ended.
        """
        device = tensors[0].device
        if device.type != "cuda":
            return cls([each.clone() for each in tensors], device)
        copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for copy, each in zip(copies, tensors, strict=True):
            copy.copy_(each, non_blocking=True)
        return cls(copies, device)

    def ready(self) -> bool:
        """Whether `wait` returns immediately."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait for the copies and return them; does not wait for work launched after them."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
