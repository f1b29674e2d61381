"""Limits of a device: memory bandwidth and matmul rate, measured or given."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import frozen

from engine.cli.positive_number import positive_number
from engine.core.quant import has_float8

if TYPE_CHECKING:
    import torch

    from engine.core.device import DeviceInfo

Bandwidth = Annotated[
    float | None,
    typer.Option(
        help="Memory bandwidth to compare with, TB/s; by default a copy is timed.",
        show_default=False,
        callback=positive_number,
    ),
]
MatmulRate = Annotated[
    float | None,
    typer.Option(
        help="Matmul rate to compare with, TFLOP/s; by default one is timed.",
        show_default=False,
        callback=positive_number,
    ),
]

ROUNDS = 5
"""Timings per measurement, of which the fastest counts."""


@frozen(kw_only=True)
class Ceilings:
    """Limits of a device."""

    bandwidth: float
    """Bytes per second, read and written."""
    flops: float
    """Floating-point operations per second of a large matmul."""
    source: str
    """Where each limit comes from, as text: measured or given."""


def find_ceilings(
    device: DeviceInfo, dtype: str, weight_bits: float, bandwidth: float | None, matmul: float | None
) -> Ceilings:
    """The given limits (TB/s, TFLOP/s), or measured ones.

    Layers of 8-bit weights are compared with an 8-bit matmul, where the device has one.
    """
    _release(device.torch_name)
    fp8 = 6 < weight_bits < 12 and has_float8(device)
    sources = []
    if bandwidth is None:
        bandwidth = copy_rate(device.torch_name) / 1e12
        sources.append(f"copy {bandwidth:.3g} TB/s (read and written)")
    else:
        sources.append(f"bandwidth {bandwidth:.3g} TB/s as given")
    if matmul is None:
        matmul = matmul_rate(device.torch_name, "float8_e4m3fn" if fp8 else dtype) / 1e12
        sources.append(f"{'float8' if fp8 else dtype} matmul {matmul:.3g} TFLOP/s")
    else:
        sources.append(f"matmul {matmul:.3g} TFLOP/s as given")
    return Ceilings(bandwidth=bandwidth * 1e12, flops=matmul * 1e12, source=", ".join(sources))


def _release(device: str) -> None:
    """Free the memory that a closed engine has left on a GPU."""
    if device.startswith("cuda"):
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def copy_rate(device: str, size: int = 0) -> float:
    """Bytes per second that a copy of `size` bytes reads and writes; size 0: far beyond any cache."""
    import torch

    size = size or (2**30 if device.startswith("cuda") else 2**27)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(device, lambda: target.copy_(source))


def matmul_rate(device: str, dtype: str, size: int = 0) -> float:
    """Operations per second of a square matmul; size 0: 8192 on a GPU, 1024 elsewhere."""
    import torch

    size = size or (8192 if device.startswith("cuda") else 1024)
    if dtype == "float8_e4m3fn":
        left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
        right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        seconds = _best(
            device, lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        )
    else:
        kind: torch.dtype = getattr(torch, dtype)
        a = torch.randn(size, size, device=device, dtype=kind)
        b = torch.randn(size, size, device=device, dtype=kind)
        seconds = _best(device, lambda: a @ b)
    return 2 * size**3 / seconds


def _best(device: str, work: Callable[[], object]) -> float:
    """Minimum seconds per call."""
    import torch

    calls = 10 if device.startswith("cuda") else 1
    least = float("inf")
    for _ in range(ROUNDS):
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        least = min(least, (time.perf_counter() - begin) / calls)
    return least
