"""The functions of the CUDA driver for copies and flags between GPUs, which torch does not have."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

WAIT, WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32."""
_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""
_NO_TIMING = 2
"""CU_EVENT_DISABLE_TIMING."""


class _MemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams: a wait for a 32-bit number, or a write of one."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


def current_stream(index: int) -> int:
    """The handle of the current stream of the GPU with this index."""
    return torch._C._cuda_getCurrentRawStream(index)


def batch(operations: Sequence[tuple[int, int, int]]) -> Any:
    """An array of memory operations: (WAIT or WRITE, address, number)."""
    array = (_MemOp * len(operations))()
    for one, (operation, address, value) in zip(array, operations, strict=True):
        one.operation, one.address, one.value = operation, address, value
        one.flags = _EQUAL if operation == WAIT else 0
    return array


class Driver:
    """The few functions of the CUDA driver that torch does not have. They return 0, or the number of an error."""

    def __init__(self) -> None:
        """Raises OSError where there is no CUDA driver, and AttributeError for one that is too old."""
        from engine.ops.common.cuda_driver import open_driver

        library = open_driver()
        handle, number, address = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64

        def function(name: str, *arguments: Any) -> Callable[..., int]:
            found = getattr(library, name)
            found.argtypes = arguments
            return found  # type: ignore[no-any-return]

        self.memory_operations = function("cuStreamBatchMemOp_v2", handle, number, ctypes.c_void_p, number)
        """Stream, number of operations, their array, 0."""
        self.copy = function("cuMemcpyAsync", address, address, ctypes.c_size_t, handle)
        """Target, source, bytes, stream."""
        self.record = function("cuEventRecord", handle, handle)
        """Event, stream."""
        self.wait_event = function("cuStreamWaitEvent", handle, handle, number)
        """Stream, event, 0."""
        self._create = function("cuEventCreate", ctypes.c_void_p, number)

    @classmethod
    def find(cls, device: torch.device) -> Driver | None:
        """The driver of a GPU, if the GPU has memory operations."""
        try:
            driver = cls()
        except (OSError, AttributeError):
            return None
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        operations = batch([(WRITE, flag.data_ptr(), 1), (WAIT, flag.data_ptr(), 1)])
        index = device.index if device.index is not None else torch.cuda.current_device()
        failed = driver.memory_operations(current_stream(index), len(operations), operations, 0)
        return None if failed else driver

    def event(self) -> int:
        """A new event. Raises RuntimeError if the driver fails."""
        made = ctypes.c_void_p()
        failed = self._create(ctypes.byref(made), _NO_TIMING)
        if failed or made.value is None:
            raise RuntimeError(f"CUDA error {failed} in cuEventCreate")
        return made.value
