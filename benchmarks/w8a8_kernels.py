"""W8A8 GEMMs, one at a time: every autotuning candidate, compared with torch's kernels.

    python benchmarks/w8a8_kernels.py [--kinds fp8 int8] [--shapes down ...] [--rows 64 128 ...]

Shapes are those of Llama-3.1-8B and, on request, Qwen3-0.6B. Weights rotate over more memory than the L2 cache holds,
up to MAX_COPIES copies; x is quantized beforehand. Prints microseconds, 10^12 operations per second and the error
relative to float32, the fastest first. `row-wise` and `tensor-wise` are torch._scaled_mm with a scale per row and per
tensor (the latter computes something else, for comparison); `_int_mm` is torch's without scales, which writes int32.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import models
import torch
import torch.nn.functional as F
import triton
from attrs import frozen
from triton.runtime.errors import OutOfResources

from engine.core.autotune import GraphTimer
from engine.ops.activation.quantize_rows import quantize_rows
from engine.ops.gemm.scaled_matmul import W8A8Tile, compile_matmul, matmul
from engine.ops.gemm.skinny_launch import Workspace
from engine.plugins.quant.w8a8_matmul import W8A8Matmul
from engine.plugins.quant.w8a8_tiles import ROW_CLASSES

DEVICE = torch.device("cuda", 0)
KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LINEARS = models.LINEARS["llama-3.1-8b"]
SMALL = {f"small_{name}": shape for name, shape in models.LINEARS["qwen3-0.6b"].items()}
ROWS = (64, 128, 256, 8192)
COLD_BYTES = 150e6
MAX_COPIES = 8
CHECKED_ROWS = 300
UNSCALED = ("tensor-wise", "_int_mm")
"""Ways whose results differ by the missing scales, and are not checked."""

Call = Callable[[torch.Tensor], torch.Tensor]


@frozen(kw_only=True, eq=False)
class Product:
    """One GEMM."""

    x: torch.Tensor
    x_scale: torch.Tensor
    weights: list[torch.Tensor]
    """Copies of one weight."""
    scale: torch.Tensor
    workspace: Workspace

    @classmethod
    def make(cls, kind: str, rows: int, outputs: int, inputs: int, workspace: Workspace) -> Product:
        """A product of random operands."""
        x, x_scale = quantize_rows(torch.randn(rows, inputs, device=DEVICE).bfloat16(), KINDS[kind])
        weight, scale = quantize_rows(torch.randn(outputs, inputs, device=DEVICE).bfloat16(), KINDS[kind])
        copies = min(max(int(COLD_BYTES / weight.nbytes), 2), MAX_COPIES)
        weights = [weight, *(weight.clone() for _ in range(copies - 1))]
        return cls(x=x, x_scale=x_scale, weights=weights, scale=scale, workspace=workspace)

    @property
    def candidates(self) -> list[W8A8Tile]:
        """The autotuning candidates for this number of rows."""
        outputs, inputs = self.weights[0].shape
        multiplier = W8A8Matmul(self.workspace, self.x.dtype, outputs, inputs, torch.bfloat16)
        rows = next((most for most in ROW_CLASSES if most >= self.x.shape[0]), ROW_CLASSES[-1])
        return [tile for tile in multiplier.shape.candidates(rows) if tile is not None]

    def by_tile(self, tile: W8A8Tile) -> Call:
        """By our kernel."""
        more = (self.scale, None, torch.bfloat16, tile, self.workspace)
        return lambda weight: matmul(self.x, self.x_scale, weight, *more)

    def compile(self, tile: W8A8Tile) -> None:
        """Compile what `by_tile` will launch."""
        compile_matmul(self.x, self.x_scale, self.weights[0], self.scale, None, torch.bfloat16, tile, self.workspace)

    def ways(self) -> Iterator[tuple[str, Call]]:
        """All ways, by name."""
        for tile in self.candidates:
            yield str(tile), self.by_tile(tile)
        if self.x.dtype == torch.int8:
            yield "_int_mm", lambda weight: torch._int_mm(self.x, weight.t())
            return
        scales, one = (self.x_scale[:, None], self.scale[None, :]), torch.ones((), device=DEVICE)
        for name, scale_a, scale_b in (("row-wise", *scales), ("tensor-wise", one, one)):
            yield (
                name,
                lambda weight, scale_a=scale_a, scale_b=scale_b: torch._scaled_mm(
                    self.x, weight.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
                ),
            )

    def error(self, call: Call) -> float:
        """The error of the last rows, relative to float32."""
        exact = F.linear(self.x[-CHECKED_ROWS:].float(), self.weights[0].float())
        exact *= self.x_scale[-CHECKED_ROWS:, None] * self.scale[None, :]
        got = call(self.weights[0])[-CHECKED_ROWS:].float()
        return float((got - exact).norm() / exact.norm())

    def seconds(self, timer: GraphTimer, call: Call) -> float:
        """Seconds of one call, weights not in cache."""
        return timer.replayed(lambda: [call(weight) for weight in self.weights] and None) / len(self.weights)


def show(product: Product, title: str, timer: GraphTimer) -> None:
    """Measure and print all ways."""
    threads = ThreadPoolExecutor(min(os.cpu_count() or 1, 16))
    with threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for tile in product.candidates:
            product.compile(tile)
    operations = 2 * product.x.numel() * product.weights[0].shape[0]
    timed = []
    for name, call in product.ways():
        try:
            error = "" if name in UNSCALED else f"error {product.error(call):.4f}"
            timed.append((product.seconds(timer, call), name, error))
        except (OutOfResources, RuntimeError) as failure:
            print(f"    {name}: {failure}")
    print(title)
    for seconds, name, error in sorted(timed):
        print(f"    {seconds * 1e6:8.1f} us {operations / seconds / 1e12:6.0f} T/s  {error:<12}  {name}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--shapes", nargs="*", choices=[*LINEARS, *SMALL], default=list(LINEARS))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        timer, workspace = GraphTimer(DEVICE), Workspace(DEVICE)
        for kind in arguments.kinds:
            for shape in arguments.shapes:
                for rows in arguments.rows:
                    product = Product.make(kind, rows, *(LINEARS | SMALL)[shape], workspace)
                    show(product, f"{shape} {kind}, {rows} rows", timer)


if __name__ == "__main__":
    main()
