"""Linear layers with eight-bit weights beside bf16: microseconds replayed from a CUDA graph, weights cold.

    python benchmarks/quant_kernels.py [--tune] [--only fp8 block int8] [--rows 1 8 ...] [--json FILE]

What is timed is what a layer does: activations quantized where they are, SiLU * up for gate and up. The rate is bytes
of weights over time. The error is the relative norm of the difference to float32 with the dequantized weight, and fails
the run if it is large. --tune: the best ways of each shape and number of rows, with the tile; "codes" and "many" take
quantized activations, and include quantizing them.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from attrs import evolve
from triton.runtime.errors import OutOfResources

from engine.cli.bench.report import Row, report, write
from engine.core.kernels.activation import silu_and_mul
from engine.core.layers.timing import GraphTimer
from engine.core.quant import LinearPart, LinearSpec
from engine.plugins.kernels.quantize_rows import quantize_rows
from engine.plugins.kernels.scaled_matmul import MatmulTile, matmul
from engine.plugins.kernels.skinny8_launch import Launch, Problem, Tile, Workspace, split, with_ahead
from engine.plugins.quant.eight_bit import EightBitFormat
from engine.plugins.quant.eight_bit_gpu import GpuKernel, widen

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16
COLD_BYTES = 150e6
"""Weights of one replay together, three L2 caches of an H200."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)
SHAPES = {
    "qkv": (("q", 4096), ("k", 1024), ("v", 1024)),
    "output": (("o", 4096),),
    "gate_up": (("gate", 14336), ("up", 14336)),
    "down": (("down", 4096),),
}
INPUTS = {"qkv": 4096, "output": 4096, "gate_up": 4096, "down": 14336}
"""Of Llama-3.1-8B."""
FORMATS = {
    "fp8": EightBitFormat(dtype="float8_e4m3fn", granularity="channel", activations="token"),
    "block": EightBitFormat(dtype="float8_e4m3fn", granularity="block", activations="token"),
    "int8": EightBitFormat(dtype="int8", granularity="channel", activations="token"),
}
MOST_ERROR = {"fp8": 0.05, "block": 0.05, "int8": 0.02}
"""Rounding activations to codes makes some of it; the rest is bf16."""

VECTORS = [
    Tile(form="vector", rows=rows, block_k=block_k, warps=warps)
    for rows, block_k, warps in ((2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (16, 1024, 4), (4, 2048, 4), (4, 2048, 8),
                                 (8, 2048, 8), (8, 512, 2), (16, 512, 2))
]  # fmt: skip
MATRICES = [
    Tile(form="matrix", rows=rows, block_k=block_k, warps=warps, stages=stages)
    for rows, block_k, warps, stages in ((64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 3), (64, 256, 4, 4),
                                         (128, 128, 4, 4), (128, 128, 8, 4), (128, 256, 8, 3))
]  # fmt: skip
SPLITS = (1, 2, 4, 8)
MATMULS = [
    MatmulTile(rows=rows, outputs=outputs, warps=warps, stages=stages, block_k=block_k)
    for rows, outputs, block_k, warps, stages in ((64, 128, 128, 4, 4), (128, 128, 128, 4, 4), (128, 128, 128, 8, 4),
                                                  (128, 256, 128, 8, 3), (128, 256, 128, 8, 4), (256, 128, 128, 8, 3),
                                                  (128, 256, 64, 8, 4))
]  # fmt: skip

Call = Callable[[torch.Tensor], torch.Tensor]


class Layers:
    """Layers of one shape and format, enough to be cold."""

    def __init__(self, shape: str, form: EightBitFormat, workspace: Workspace) -> None:
        self.gated = shape == "gate_up"
        self.workspace = workspace
        parts = tuple(LinearPart(name=name, out_features=outputs) for name, outputs in SHAPES[shape])
        spec = LinearSpec(
            parts=parts,
            in_features=INPUTS[shape],
            bias=False,
            dtype=str(DTYPE).removeprefix("torch."),
            device=str(DEVICE),
            gated=self.gated,
        )
        self.kernel = GpuKernel(spec, form, workspace)
        self.nbytes = spec.out_features * spec.in_features
        self.weights = [
            self.kernel.prepare(
                {
                    f"{part.name}.weight": torch.randn(part.out_features, spec.in_features, device=DEVICE).to(DTYPE)
                    / spec.in_features**0.5
                    for part in parts
                }
            )
            for _ in range(min(max(math.ceil(COLD_BYTES / self.nbytes), 2), 16))
        ]
        self.problem = Problem(
            weight_rows=spec.out_features,
            inputs=spec.in_features,
            scale_rows=self.kernel.scale_rows,
            gated=self.gated,
        )

    def own(self) -> list[Call]:
        """As the engine multiplies."""
        apply = self.kernel.apply_gated if self.gated else self.kernel.apply
        return [lambda x, weights=weights: apply(x, weights, None) for weights in self.weights]

    def plain(self) -> list[Call]:
        """By bf16 weights."""
        wide = [widen(weights, DTYPE, self.kernel.scale_rows) for weights in self.weights]
        return [lambda x, weight=weight: self.activate(F.linear(x, weight)) for weight in wide]

    def activate(self, y: torch.Tensor) -> torch.Tensor:
        """Of a product, where the layer activates."""
        return silu_and_mul(y) if self.gated else y

    def error(self, x: torch.Tensor, call: Call) -> float:
        """Of the first layer, relative to float32."""
        y = x.float() @ widen(self.weights[0], torch.float32, self.kernel.scale_rows).t()
        exact = F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if self.gated else y
        return float((call(x).float() - exact).norm() / exact.norm())

    def launches(self, rows: int, *, codes: bool) -> Iterator[tuple[str, Launch]]:
        """All tiles worth a try for some rows."""
        columns = min(max(16, triton.next_power_of_2(rows)), 128)
        vectors = VECTORS if rows <= 4 and not codes else []
        for tile in vectors:
            if not self.problem.scale_rows or self.problem.scale_rows % tile.rows == 0:
                yield self._launch(tile, rows, codes)
        for tile in MATRICES:
            if self.problem.scale_rows and tile.block_k != 128:
                continue
            wide = evolve(tile, columns=columns)
            most = split(wide, self.problem, rows, DEVICE).splits
            for splits in sorted({*(one for one in SPLITS if one <= most), most}):
                yield self._launch(evolve(wide, splits=splits), rows, codes)

    def _launch(self, tile: Tile, rows: int, codes: bool) -> tuple[str, Launch]:
        tile = with_ahead(tile, self.problem)
        return ("codes " if codes else "few ") + str(tile), Launch(
            self.problem, tile, rows, self.workspace, codes=codes
        )

    def ways(self, rows: int) -> Iterator[tuple[str, list[Call]]]:
        """All ways to multiply so many rows."""
        blocked = self.problem.scale_rows > 0
        dtype = self.weights[0]["weight"].dtype
        if rows <= 128:
            for name, launch in self.launches(rows, codes=False):
                yield (
                    name,
                    [
                        lambda x, weights=weights, launch=launch: launch(
                            x, weights["weight"], weights["scale"], None, DTYPE
                        )
                        for weights in self.weights
                    ],
                )
        if rows <= 512:
            for name, launch in self.launches(rows, codes=True):

                def by_codes(x: torch.Tensor, weights: dict, launch: Launch = launch) -> torch.Tensor:
                    codes, x_scale = quantize_rows(x, dtype, grouped=blocked)
                    return launch(codes, weights["weight"], weights["scale"], None, DTYPE, x_scale)

                yield name, [lambda x, weights=weights, run=by_codes: run(x, weights) for weights in self.weights]
        if rows >= 64:
            for tile in MATMULS:

                def by_tiles(x: torch.Tensor, weights: dict, tile: MatmulTile = tile) -> torch.Tensor:
                    codes, x_scale = quantize_rows(x, dtype, grouped=blocked)
                    y = matmul(
                        codes, x_scale, weights["weight"], weights["scale"], None, DTYPE, tile, self.problem.scale_rows
                    )
                    return self.activate(y)

                yield (
                    f"many {tile}",
                    [lambda x, weights=weights, run=by_tiles: run(x, weights) for weights in self.weights],
                )
        if rows >= 32 and not blocked:
            yield from self.by_torch(dtype)

    def by_torch(self, dtype: torch.dtype) -> Iterator[tuple[str, list[Call]]]:
        """torch's kernels: float8 with scales a row, int8 (without scales, which would be another kernel)."""

        def by_floats(x: torch.Tensor, weights: dict, fast: bool) -> torch.Tensor:
            codes, x_scale = quantize_rows(x, dtype)
            y = torch._scaled_mm(
                codes,
                weights["weight"].t(),
                scale_a=x_scale[:, None],
                scale_b=weights["scale"][None, :],
                out_dtype=DTYPE,
                use_fast_accum=fast,
            )
            return self.activate(y)

        def by_integers(x: torch.Tensor, weights: dict) -> torch.Tensor:
            return torch._int_mm(quantize_rows(x, dtype)[0], weights["weight"].t())

        if dtype == torch.int8:
            yield (
                "torch._int_mm, unscaled",
                [lambda x, weights=weights: by_integers(x, weights) for weights in self.weights],
            )
            return
        for fast in (True, False):
            yield (
                f"torch._scaled_mm, fast {fast}",
                [lambda x, weights=weights, fast=fast: by_floats(x, weights, fast) for weights in self.weights],
            )


def seconds(timer: GraphTimer, x: torch.Tensor, calls: Sequence[Call]) -> float:
    """Of one call, cold; inf for one that needs more than the GPU has."""
    try:
        return timer.replayed(lambda: [call(x) for call in calls]) / len(calls)  # type: ignore[func-returns-value]
    except OutOfResources:
        return float("inf")


def inputs(rows: int, size: int) -> torch.Tensor:
    """Activations with a few large ones, as models have."""
    x = torch.randn(rows, size, device=DEVICE)
    x[:, :: max(size // 8, 1)] *= 20
    return x.to(DTYPE)


def compile_all(layers: Layers, rows: Sequence[int]) -> None:
    """Compile what --tune will time, in threads."""
    weights = layers.weights[0]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as threads, triton.AsyncCompileMode(threads):
        for count in rows:
            for codes in (False, True):
                if count > (512 if codes else 128):
                    continue
                dtype = weights["weight"].dtype if codes else DTYPE
                x = torch.empty(count, layers.problem.inputs, device=DEVICE, dtype=dtype)
                for _, launch in layers.launches(count, codes=codes):
                    launch.compile(x, weights["weight"], weights["scale"], DTYPE)


def measure(
    timer: GraphTimer, shape: str, name: str, rows: Sequence[int], tune: bool, workspace: Workspace
) -> list[Row]:
    """One shape in one format."""
    layers = Layers(shape, FORMATS[name], workspace)
    own, plain = layers.own(), layers.plain()
    if tune:
        compile_all(layers, rows)
    found = []
    for count in rows:
        x = inputs(count, layers.problem.inputs)
        spent, baseline = seconds(timer, x, own), seconds(timer, x, plain)
        error = layers.error(x, own[0])
        rate, plain_rate = layers.nbytes / spent / 1e12, 2 * layers.nbytes / baseline / 1e12
        mine, bf16 = f"{spent * 1e6:8.1f} us {rate:5.2f} TB/s", f"{baseline * 1e6:8.1f} us {plain_rate:5.2f} TB/s"
        print(
            f"{shape:<8}{name:<6}{count:>5} rows  {mine}   bf16 {bf16}   x{baseline / spent:4.2f}   error {error:.4f}",
            flush=True,
        )
        if not error < MOST_ERROR[name]:
            sys.exit(f"{shape} {name} at {count} rows is wrong")
        found.append(
            Row(
                metric=f"{shape} {name} {count} rows",
                value=spent * 1e6,
                unit="us",
                baseline=baseline * 1e6,
                baseline_name="bf16",
            )
        )
        if tune:
            show_best(timer, layers, x, MOST_ERROR[name])
    return found


def show_best(timer: GraphTimer, layers: Layers, x: torch.Tensor, most_error: float) -> None:
    """Print the best three of each kind of way, and any that is wrong."""
    timed: dict[str, list[tuple[float, str]]] = {}
    for name, calls in layers.ways(x.shape[0]):
        spent = seconds(timer, x, calls)
        if spent == float("inf"):
            continue
        if "unscaled" not in name and not layers.error(x, calls[0]) < most_error:
            print(f"        WRONG  {name}")
            continue
        timed.setdefault(name.split()[0], []).append((spent, name))
    for ranked in timed.values():
        for spent, name in sorted(ranked)[:3]:
            print(f"        {spent * 1e6:8.1f} us  {name}", flush=True)


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--only", nargs="*", default=list(FORMATS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found: list[Row] = []
    with torch.inference_mode():
        timer, workspace = GraphTimer(DEVICE), Workspace(DEVICE)
        for shape in arguments.shapes:
            for name in arguments.only:
                found += measure(timer, shape, name, arguments.rows, arguments.tune, workspace)
                torch.cuda.empty_cache()
    if arguments.json is not None:
        machine = f"{torch.cuda.get_device_name(DEVICE)}, triton {triton.__version__}"
        write(arguments.json, report("quant_kernels", machine, found, {"dtype": "bfloat16", "model": "Llama-3.1-8B"}))


if __name__ == "__main__":
    main()
