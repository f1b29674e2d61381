"""Programmatic dependent launch: a kernel may start while the one before it ends.

From compute capability 9.0 on, a kernel launched with the attribute is set up, and may read what no earlier kernel
writes (weights), before its predecessor has finished; `wait` is where it stops until all memory is as the predecessor
left it. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".

When to release the next kernel: immediately, if this kernel is short. Programs of the next kernel then occupy free
multiprocessors and wait. If all its programs fit on the GPU, they are distributed unevenly in this way, and the
multiprocessors with the most programs finish late. A long kernel, such as one that reads large weights, therefore
releases the next one at the end of its loop.

What kernels before the predecessor wrote may be read before `wait` if a kernel in between released only after its own
`wait`. The first kernel of a pass (rope_and_cache.angles) does, so all others may read the batch from their beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.ops.common.cache_keys import make_cache_keys_independent_of_order

make_cache_keys_independent_of_order()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the preceding kernels; goes before the first access to memory that an earlier kernel reads or writes."""
    if PDL:
        gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start; its `wait` still waits for the end of this one."""
    if PDL:
        gdc_launch_dependents()


@cache
def has_capability(device: torch.device, minimum: tuple[int, int]) -> bool:
    """Whether a device is a CUDA GPU of at least this compute capability.

    False for a ROCm GPU, which torch calls "cuda" too: its numbers are those of another architecture (9.4 of a MI300).
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= minimum


@cache
def has_tma(device: torch.device) -> bool:
    """Whether tensor descriptors are loaded by TMA. True for a CPU, where the interpreter runs the kernels."""
    return device.type == "cpu" or has_capability(device, (9, 0))


@cache
def dependent_launch(device: torch.device) -> Mapping[str, bool]:
    """Keyword arguments for a kernel with a `PDL` flag; on where the device supports dependent launch."""
    return {"PDL": True, "launch_pdl": True} if has_capability(device, (9, 0)) else {"PDL": False}


MANY_ROWS = 2048
"""With more rows than this, kernels that read and write each row once are launched after the preceding kernel."""


def dependent_launch_of_rows(device: torch.device, rows: int) -> Mapping[str, bool]:
    """As `dependent_launch`, but off for many rows; for kernels that read and write each row once.

    Such a kernel takes so long that an early start gains nothing, and waiting programs of the next kernel take the room
    of its own programs.
    """
    return dependent_launch(device) if rows <= MANY_ROWS else {"PDL": False}


@cache
def has_wgmma(device: torch.device) -> bool:
    """Whether a GPU has wgmma, Hopper's matrix instruction, which older and newer GPUs lack."""
    return has_capability(device, (9, 0)) and not has_capability(device, (10, 0))


@cache
def num_sms(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for a CPU, where the interpreter runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Maximum shared memory of a program, bytes; on a CPU, which has none, a number larger than any kernel needs."""
    if device.type != "cuda":
        return 2**30
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


@triton.jit
def prefetch(pointers, size):
    """Prefetch `size` bytes (int32) at each pointer into the L2 cache; pointers and sizes are multiples of 16.

    From compute capability 9.0 on. Source: PTX ISA, cp.async.bulk.prefetch.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0",
        "=r,l,r",
        [pointers.to(tl.uint64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_lines(pointers):
    """Prefetch the cache line at each pointer into the L2 cache. CUDA only. Source: PTX ISA, prefetch."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0",
        "=r,l",
        [pointers.to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_lines_where(mask, pointers):
    """As `prefetch_lines`, where the mask is true."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; } // dummy $0",
        "=r,l,r",
        [pointers.to(tl.uint64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
