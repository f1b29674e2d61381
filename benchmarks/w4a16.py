"""Linear layers with 4-bit weights by themselves: microseconds replayed from a CUDA graph, beside cuBLAS in bfloat16.

    python benchmarks/w4a16.py [--tune] [--bits 4] [--group-size 128] [--zeros] [--rows 1 16 ...] [--json FILE]

Weights rotate over more memory than the L2 cache keeps. Floor: bytes of packed weights and scales over 4.2 TB/s.
`chosen` is the tile the engine launches, `library` unpacking and cuBLAS, `bf16` cuBLAS by plain weights. --tune: all
tiles, the best printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from attrs import evolve, frozen
from triton.runtime.errors import OutOfResources

from engine.cli.bench.report import Row, report, write
from engine.core.kernels.activation import silu_and_mul
from engine.core.kernels.skinny_launch import MOST_SUMS
from engine.core.layers.timing import GraphTimer
from engine.plugins.kernels.w4a16_launch import COLUMNS, MOST_ROWS, Multiplier, Problem, Tile, choose, split
from engine.plugins.quant.layout import Layout

BANDWIDTH = 4.2e12
DEVICE = torch.device("cuda", 0)
COLD_BYTES = 150e6
"""Weights of one replay together, three L2 caches of an H200."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)
LINEARS = ((False, 6144, 4096), (False, 4096, 4096), (True, 28672, 4096), (False, 4096, 14336))
"""Of Llama-3.1-8B: gated, rows of W, inputs."""
SHAPES = ((32, 2), (64, 2), (64, 4), (128, 4), (128, 8))
"""Rows of W and warps of the tiles that --tune tries."""

Calls = Callable[[], object]


@frozen(kw_only=True)
class Weights:
    """Copies of one layer's weights, packed and plain, enough to be cold."""

    problem: Problem
    packed: Sequence[tuple[torch.Tensor, torch.Tensor]]
    plain: Sequence[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Of one packed copy."""
        return sum(tensor.nbytes for tensor in self.packed[0])


def make(problem: Problem, group_size: int, zeros: bool) -> Weights:
    """Random ones; the bits of words and the sizes of scales are all that counts."""
    layout, rows, inputs = problem.layout, problem.weight_rows, problem.inputs
    values = torch.randint(0, 2**layout.bits, (rows, inputs), dtype=torch.uint8, device=DEVICE)
    groups = 1 if group_size == -1 else -(-inputs // group_size)
    scales = (torch.rand(groups, rows, device=DEVICE) / 100).half()
    offsets = torch.full_like(scales, 2 ** (layout.bits - 1), dtype=torch.uint8) if zeros else None
    first = layout.pack(values, scales, offsets, group_size, "bfloat16")
    count = max(int(COLD_BYTES / sum(tensor.nbytes for tensor in first)), 2)
    packed = [first, *((first[0].clone(), first[1].clone()) for _ in range(count - 1))]
    plain = [torch.randn(rows, inputs, device=DEVICE).bfloat16() for _ in range(max(count // 4, 2))]
    return Weights(problem=problem, packed=packed, plain=plain)


def seconds(timer: GraphTimer, calls: Sequence[Calls]) -> float:
    """Of one call among these; inf if it cannot run."""

    def all_calls() -> None:
        for call in calls:
            call()

    try:
        return timer.replayed(all_calls) / len(calls)
    except OutOfResources:
        return float("inf")


def by_tile(multiplier: Multiplier, weights: Weights, x: torch.Tensor, tile: Tile) -> list[Calls]:
    """The multiplication by each copy."""
    problem = weights.problem
    return [
        lambda pair=pair: multiplier.by_tiles(x, *pair, problem.layout, None, problem.gated, tile)
        for pair in weights.packed
    ]


def by_library(multiplier: Multiplier, weights: Weights, x: torch.Tensor) -> list[Calls]:
    """The same, unpacked."""
    problem = weights.problem
    return [
        lambda pair=pair: multiplier.by_library(x, *pair, problem.layout, None, problem.gated)
        for pair in weights.packed
    ]


def by_plain(weights: Weights, x: torch.Tensor) -> list[Calls]:
    """The same by bfloat16 weights."""
    gated = weights.problem.gated
    return [
        lambda weight=weight: silu_and_mul(F.linear(x, weight)) if gated else F.linear(x, weight)
        for weight in weights.plain
    ]


def tiles(rows: int) -> list[Tile]:
    """All that --tune tries at so many rows, splits and blocks ahead aside."""
    columns = next((size for size in COLUMNS if size >= rows), COLUMNS[-1])
    few = columns <= 32
    return [
        Tile(rows=tile_rows, columns=columns, warps=warps, stages=stages, early=early)
        for (tile_rows, warps), stages, early in itertools.product(SHAPES, (3, 4) if few else (2, 3), (False, True))
        if not (few and early) and not (columns == 128 and warps == 2)
    ]


def variants(tile: Tile, problem: Problem, rows: int, sms: int) -> list[Tile]:
    """Its splits, with and without blocks ahead."""
    default = split(tile, problem, rows, sms)
    splits = {default.splits, max(default.splits // 2, 1), min(default.splits * 2, max(problem.blocks // 2, 1))}
    found = [evolve(default, splits=number, ahead=ahead) for number in sorted(splits) for ahead in (0, 16)]
    return [
        one
        for one in found
        if one.splits == 1 or one.programs(problem, rows) * one.splits * one.rows * one.columns <= MOST_SUMS
    ]


def tune(
    timer: GraphTimer, multiplier: Multiplier, weights: Weights, rows: int, x: torch.Tensor
) -> list[tuple[float, Tile]]:
    """All tiles, the fastest first."""
    problem = weights.problem
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    wanted = [one for tile in tiles(rows) for one in variants(tile, problem, rows, sms)]
    with (
        ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
    ):
        for tile in {evolve(one, splits=min(one.splits, 2), ahead=0) for one in wanted}:
            multiplier.compile(x, *weights.packed[0], problem.layout, problem.gated, tile)
    timed = [(seconds(timer, by_tile(multiplier, weights, x, tile)), tile) for tile in wanted]
    return sorted(timed, key=lambda pair: pair[0])


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--zeros", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found: list[Row] = []
    with torch.inference_mode():
        timer, multiplier = GraphTimer(DEVICE), Multiplier(DEVICE)
        sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        layout = Layout.choose(arguments.bits, arguments.group_size)
        for gated, weight_rows, inputs in LINEARS:
            problem = Problem(gated=gated, weight_rows=weight_rows, inputs=inputs, layout=layout)
            weights = make(problem, arguments.group_size, arguments.zeros)
            for rows in arguments.rows:
                x = torch.randn(rows, inputs, device=DEVICE).bfloat16()
                times = {"bf16": seconds(timer, by_plain(weights, x))}
                tile = choose(problem, rows, sms)
                if tile is not None:
                    times["chosen"] = seconds(timer, by_tile(multiplier, weights, x, tile))
                if rows >= 64:
                    times["library"] = seconds(timer, by_library(multiplier, weights, x))
                best: list[tuple[float, Tile]] = []
                if arguments.tune and rows <= MOST_ROWS:
                    best = tune(timer, multiplier, weights, rows, x)[:5]
                    times["best"] = best[0][0]
                floor = weights.nbytes / BANDWIDTH * 1e6
                told = "  ".join(f"{name} {time * 1e6:7.1f}" for name, time in times.items())
                fastest = min(time for name, time in times.items() if name != "bf16")
                rate = weights.nbytes / fastest / 1e12
                print(f"{problem!s:<44}{rows:>5} rows  floor {floor:5.1f}  {told}  {rate:4.2f} TB/s", flush=True)
                for time, one in best:
                    print(f"        {time * 1e6:7.1f}  {one}")
                found += [
                    Row(metric=f"{problem} {rows} rows, {name}", value=time * 1e6, unit="us")
                    for name, time in times.items()
                ]
            del weights
            torch.cuda.empty_cache()
    if arguments.json is not None:
        machine = f"{torch.cuda.get_device_name(DEVICE)}, triton {triton.__version__}"
        settings = {"bits": arguments.bits, "group_size": arguments.group_size, "zeros": arguments.zeros}
        write(arguments.json, report("w4a16", machine, found, {**settings, "bandwidth": BANDWIDTH}))


if __name__ == "__main__":
    main()
