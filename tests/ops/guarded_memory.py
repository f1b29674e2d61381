"""GPU memory with nothing mapped in front of it, so that a kernel that reads before a tensor's start is stopped.

In the memory of torch's allocator such a read mostly finds another tensor and goes unnoticed. Here the driver ends it
with "an illegal memory access". The process cannot use the GPU any more then, so its later GPU tests fail too.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from engine.ops.common.cuda_driver import open_driver

_PINNED = _ON_DEVICE = 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Memory:
    """What torch.as_tensor reads."""

    def __init__(self, address: int, values: torch.Tensor) -> None:
        types = {torch.int32: "<i4", torch.float32: "<f4"}
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": tuple(values.shape),
            "typestr": types[values.dtype],
            "version": 3,
        }


def guarded(values: torch.Tensor) -> torch.Tensor:
    """A copy of a GPU's tensor, of int32 or float32, at the start of mapped memory. Never freed."""
    driver = open_driver()

    def call(name: str, *arguments: Any) -> None:
        code = getattr(driver, name)(*arguments)
        assert code == 0, f"{name}: CUDA error {code}"

    location = _Location(_ON_DEVICE, values.device.index)
    allocation = _Allocation(type=_PINNED, location=location)
    unit = ctypes.c_size_t()
    call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(allocation), 0)
    size = -(-values.nbytes // unit.value) * unit.value
    address, handle = ctypes.c_uint64(), ctypes.c_uint64()
    nothing = ctypes.c_uint64(0)
    call(
        "cuMemAddressReserve",
        ctypes.byref(address),
        ctypes.c_size_t(unit.value + size),
        ctypes.c_size_t(0),
        nothing,
        nothing,
    )
    mapped = ctypes.c_uint64(address.value + unit.value)
    call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(allocation), nothing)
    call("cuMemMap", mapped, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, nothing)
    access = _Access(location, _READ_AND_WRITE)
    call("cuMemSetAccess", mapped, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
    copy = torch.as_tensor(_Memory(mapped.value, values), device=values.device)
    assert copy.data_ptr() == mapped.value
    return copy.copy_(values)
