"""Programmatic dependent launch: a kernel may start while the one before it ends.

From compute capability 9.0 on, a kernel launched with the attribute is set up, and may read what no earlier kernel
writes (weights), before its predecessor has finished; `wait` is where it stops until all memory is as the predecessor
left it. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".

When to release the next kernel: at once, if this one is over soon. Programs of the next one then stand where there is
room, and wait. If they are no more than fit at once they are shared out unevenly so, and the multiprocessors that have
most of them are late. A kernel that takes long, as one that reads large weights, releases it at the end of its loop.

What kernels before the predecessor wrote may be read before `wait` if one of those in between released only after its
own wait. The first kernel of a pass does (rope.angles), so all others have the batch as it stands from the beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(PDL: tl.constexpr):
    """Before the first access to what an earlier kernel reads or writes."""
    if PDL:
        gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel be set up; it waits by itself for this one's end."""
    if PDL:
        gdc_launch_dependents()


@cache
def dependent_launch(device: torch.device) -> Mapping[str, bool]:
    """Keyword arguments for a kernel with a `PDL` flag: on where the device knows such launches."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def has_wgmma(device: torch.device) -> bool:
    """Whether a GPU has Hopper's matrix instruction, which older ones lack, and newer ones too."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for a CPU, where the interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; more than enough on a CPU, where nothing is shared."""
    if device.type != "cuda":
        return 2**30
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


@triton.jit
def prefetch(pointers, size):
    """Ask for the `size` bytes (int32) at each pointer to be brought into the L2 cache; multiples of 16 both.

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
