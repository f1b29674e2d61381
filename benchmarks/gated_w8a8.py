"""Gated W8A8 layers of many rows: the activation in the GEMM's epilogue, compared with a kernel of its own.

    python benchmarks/gated_w8a8.py [--kinds fp8 int8] [--shapes 28672x4096 ...] [--rows 512 8192 ...] [--json FILE]

Each way computes the quantized input of the next layer from quantized x. `separate` and `library` (torch's): the GEMM,
then act_and_mul_quantize. `gated`: gated_matmul, then quantize_rows. Shapes are outputs of gate and up x inputs.

Under sustained load, where the power limit sets the clock: all ways of all shapes in random order, round by round, each
from a CUDA graph, first unmeasured for SETTLE seconds. Prints microseconds per call, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from w8a8_kernels import DEVICE, KINDS

from engine.ops.activation.act_and_mul_quantize import act_and_mul_quantize
from engine.ops.activation.quantize_rows import quantize_rows
from engine.ops.gemm.scaled_matmul import GATED_TILE, W8A8Tile, gated_matmul, matmul
from engine.ops.gemm.skinny_launch import Workspace

SHAPES = ("28672x4096", "6144x1024", "17920x1536", "19456x2560", "51200x5120", "7168x4096")
ROWS = (64, 128, 256, 512, 1024, 1536, 2048, 2400, 3072, 4096, 8192)
COLD_BYTES = 120e6
"""Weights of one graph, so that no cache holds them."""
MAX_COPIES = 8
SETTLE, MEASURE = 0.06, 0.08
"""Seconds per way and round: unmeasured, then measured."""
FEW_ROWS, FEW_ROWS_SHARE = 256, 0.25
"""Up to this many rows, which draw less power, a share of these seconds is enough."""
TILES = {
    64: ((64, 64, 4, 6, 256), (64, 128, 4, 8, 128)),
    128: ((128, 64, 4, 8, 128), (128, 128, 8, 6, 128)),
    256: ((128, 128, 8, 6, 128), (128, 256, 8, 4, 128)),
    512: ((128, 128, 8, 6, 128), (128, 256, 8, 4, 128)),
}
"""Persistent tiles for up to this many rows: those that autotuning mostly chooses. For more, GATED_TILE's shape."""

Graph = tuple[torch.cuda.CUDAGraph, int, object]
"""Calls, their number, and what keeps their operands alive."""
Case = tuple[str, str, int]
"""Kind, shape and rows."""


def tiles(rows: int) -> list[W8A8Tile]:
    """The tiles of `separate` GEMMs."""
    shapes = next((TILES[most] for most in TILES if most >= rows), TILES[512][1:])
    return [
        W8A8Tile(rows=tile, outputs=outputs, warps=warps, stages=stages, block_k=block_k, persistent=True)
        for tile, outputs, warps, stages, block_k in shapes
    ]


@cache
def random_weights(kind: str, outputs: int, inputs: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Copies of a weight, and its scale."""
    weight, scale = quantize_rows(torch.randn(outputs, inputs, device=DEVICE).bfloat16(), KINDS[kind])
    copies = min(int(COLD_BYTES / weight.nbytes), MAX_COPIES - 1)
    return [weight, *(weight.clone() for _ in range(copies))], scale / inputs**0.5


def ways(
    kind: str, rows: int, outputs: int, inputs: int, workspace: Workspace, pool: Any, *, alone: bool
) -> dict[str, Graph]:
    """Graphs of all ways, and the calls of each."""
    dtype = KINDS[kind]
    x, x_scale = quantize_rows(torch.randn(rows, inputs, device=DEVICE).bfloat16(), dtype)
    weights, scale = random_weights(kind, outputs, inputs)
    weight = weights[0]

    def multiply(weight: torch.Tensor, tile: W8A8Tile) -> torch.Tensor:
        return matmul(x, x_scale, weight, scale, None, torch.bfloat16, tile, workspace)

    def multiply_gated(weight: torch.Tensor) -> torch.Tensor:
        return gated_matmul(x, x_scale, weight, scale, None, torch.bfloat16, "silu")

    def separate(tile: W8A8Tile) -> Callable[[torch.Tensor], Any]:
        return lambda weight: act_and_mul_quantize(multiply(weight, tile), dtype)

    def library(weight: torch.Tensor) -> object:
        scales = {"scale_a": x_scale[:, None], "scale_b": scale[None, :]}
        y = torch._scaled_mm(x, weight.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)
        return act_and_mul_quantize(y, dtype)

    def gated(weight: torch.Tensor) -> Any:
        return quantize_rows(multiply_gated(weight), dtype)

    calls: dict[str, Callable[[torch.Tensor], object]] = {
        f"separate {tile.rows}x{tile.outputs}": separate(tile) for tile in tiles(rows)
    } | {"gated": gated}
    if kind == "fp8":
        calls["library"] = library
    if alone:
        calls["GEMM alone"] = lambda weight: multiply(weight, GATED_TILE)
        calls["gated GEMM alone"] = multiply_gated
    found = {}
    for name, call in calls.items():
        call(weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for one in weights:
                call(one)
        found[name] = graph, len(weights), (x, x_scale, weights, scale)
    expected, got = separate(GATED_TILE)(weight), gated(weight)
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(expected, got, strict=True)
    )
    return found


def microseconds(graph: torch.cuda.CUDAGraph, calls: int, operands: object, settle: float, measure: float) -> float:
    """Of one call. Both in seconds: what is not measured, and what is."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replays = 0
    start = time.perf_counter()
    while time.perf_counter() - start < settle:
        graph.replay()
        replays += 1
        torch.cuda.synchronize()
    replays = max(round(replays * measure / settle), 1)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / (replays * calls)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--alone", action="store_true", help="measure the GEMMs alone too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="measure until then")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    workspace = Workspace(DEVICE)
    with torch.inference_mode():
        cases = [
            (kind, shape, rows) for shape in arguments.shapes for kind in arguments.kinds for rows in arguments.rows
        ]
        pool = torch.cuda.graph_pool_handle()
        graphs = {
            (case, name): graph
            for case in cases
            for name, graph in ways(
                case[0], case[2], *map(int, case[1].split("x")), workspace, pool, alone=arguments.alone
            ).items()
        }
        print(f"{len(graphs)} graphs, {time.perf_counter() - started:.0f} s", flush=True)
        times: dict[Case, dict[str, list[float]]] = {case: {} for case in cases}
        order = [one for _ in range(arguments.rounds) for one in random.sample(list(graphs), len(graphs))]
        for case, name in order:
            if time.perf_counter() - started < arguments.seconds:
                share = FEW_ROWS_SHARE if case[2] <= FEW_ROWS else 1.0
                taken = microseconds(*graphs[case, name], SETTLE * share, MEASURE * share)
                times[case].setdefault(name, []).append(taken)
    for case, of_case in times.items():
        found = {name: statistics.median(of_case[name]) for name in sorted(of_case)}
        separate = min(
            (taken for name, taken in found.items() if name.startswith(("separate", "library"))), default=float("nan")
        )
        listed = ", ".join(f"{name} {taken:.1f}" for name, taken in found.items())
        print(f"{' '.join(map(str, case))}: {found.get('gated', 0.0) / separate:.3f}  {listed}", flush=True)
    if arguments.json:
        rounded = {
            " ".join(map(str, case)): {name: [round(one, 2) for one in taken] for name, taken in of_case.items()}
            for case, of_case in times.items()
        }
        arguments.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "times": rounded}, indent=1))


if __name__ == "__main__":
    main()
