"""A safetensors file: its header, and reads of parts of its tensors by several threads.

Format: 8 bytes, the length of the header (little-endian); the header, JSON of name -> dtype, shape, data_offsets; the
tensors, row-major, at those offsets from the header's end (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open

from engine.core.errors import CheckpointError
from engine.core.weights.readers import MAX_TASK_BYTES, ReadTask

STORED_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""dtypes of a safetensors header -> of torch."""

MIN_READ_BYTES = 1 << 20
"""Runs of bytes shorter than this (1 MiB) are copied from the mapped file: a system call per run would take longer."""


@frozen
class StoredTensor:
    """The header's entry of one tensor."""

    dtype: str
    """Name in torch, or in the header if torch has no such dtype."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor's first byte in the file."""
    nbytes: int


class TensorFile:
    """An open safetensors file. Any thread may read it. It is closed once no reference to it is left."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises CheckpointError if the file is damaged or cut short."""
        self.path = path
        try:
            with safe_open(path, framework="pt", device="cpu"):
                pass  # safe_open checks the header: sizes, offsets, no gaps, nothing after the end
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            size = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
            header = json.loads(os.pread(self._descriptor, size, 8))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged or cut short ({path.stat().st_size} bytes: {error}); fetch it again"
            ) from error
        header.pop("__metadata__", None)
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(
                STORED_DTYPES.get(one["dtype"], one["dtype"]),
                tuple(one["shape"]),
                8 + size + one["data_offsets"][0],
                one["data_offsets"][1] - one["data_offsets"][0],
            )
            for name, one in header.items()
        }

    def read_tasks(self, name: str, dim: int, index: int, target: torch.Tensor, parts: int = 1) -> Iterator[ReadTask]:
        """Tasks that fill `target`, a contiguous tensor, with a slice of tensor `name` and read nothing else.

        The slice starts at `index` of dimension `dim`, is as long there as `target`, and spans the other dimensions.
        parts: of dimension `dim`, of equal size; the same slice of each is read, one after the other.
        """
        stored = self.tensors[name]
        memory = target.view(-1).view(torch.uint8)
        if not memory.numel():
            return
        inner = math.prod(stored.shape[dim + 1 :]) * target.dtype.itemsize
        runs = math.prod(stored.shape[:dim]) * parts  # the slice lies in the file as this number of runs of bytes,
        length = memory.numel() // runs  # each of this length,
        stride = inner * (stored.shape[dim] // parts if stored.shape else 1)  # at this distance
        first = stored.offset + index * inner
        if length == stride or runs == 1:
            yield from self._run(name, first, memory)
        elif length >= MIN_READ_BYTES:
            for number, run in enumerate(memory.view(runs, length)):
                yield from self._run(name, first + number * stride, run)
        else:
            max_runs = MAX_TASK_BYTES // length
            for begin in range(0, runs, max_runs):
                rows = memory.view(runs, length)[begin : begin + max_runs]
                offset = first + begin * stride
                read = partial(self._gather, offset, length, stride)
                yield ReadTask((str(self.path), offset), rows.view(-1), read)

    def _run(self, name: str, offset: int, memory: torch.Tensor) -> Iterator[ReadTask]:
        for begin in range(0, memory.numel(), MAX_TASK_BYTES):
            read = partial(self._read, name, offset + begin)
            yield ReadTask((str(self.path), offset + begin), memory[begin : begin + MAX_TASK_BYTES], read)

    def _read(self, name: str, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the file's bytes from `offset` on."""
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"tensor {name} in {self.path} cannot be read: {error.strerror}") from error
            if not count:
                raise CheckpointError(
                    f"tensor {name} in {self.path} cannot be read: the file has become shorter; was it replaced?"
                )
            done += count

    def _gather(self, offset: int, length: int, stride: int, memory: memoryview) -> None:
        """Fill `memory` with runs of `length` bytes that start `stride` bytes apart. Releases the GIL, as `_read`."""
        target = np.frombuffer(memory, np.uint8).reshape(-1, length)
        np.copyto(target, np.ndarray(target.shape, np.uint8, self._mapped, offset, (stride, 1)))

    def bytes_of(self, name: str) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The bytes of a tensor, in parts of MAX_TASK_BYTES, from the mapped file."""
        stored = self.tensors[name]
        for begin in range(0, stored.nbytes, MAX_TASK_BYTES):
            count = min(MAX_TASK_BYTES, stored.nbytes - begin)
            yield np.frombuffer(self._mapped, np.uint8, count, stored.offset + begin)

    def holds_equal(self, name: str, other: TensorFile, other_name: str) -> bool:
        """Whether a tensor equals that of another file, or of the same: in dtype, shape and every bit."""
        mine, theirs = self.tensors[name], other.tensors[other_name]
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        parts = zip(self.bytes_of(name), other.bytes_of(other_name), strict=True)
        return all(np.array_equal(first, second) for first, second in parts)

    @cached_property
    def _mapped(self) -> mmap.mmap:
        return mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
