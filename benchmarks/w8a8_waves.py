"""W8A8 products of many rows by tiles of 128 x 256 and 128 x 128, and by torch's kernel, at numbers of rows that fill
waves of programs better and worse.

    python benchmarks/w8a8_waves.py [--kinds fp8 int8] [--layers 4096x14336 ...] [--json FILE]

Layers are outputs x inputs. From CUDA graphs with cold weights, all ways and numbers of rows of a layer in random
order, round by round. Prints the number of waves of 128 x 256 and microseconds per call, the median of the rounds, and
marks the tile that `tile_by_waves` chooses where autotuning chose 128 x 256.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from w8a8_kernels import DEVICE, KINDS

from engine.ops.activation.quantize_rows import quantize_rows
from engine.ops.common.launch import num_sms
from engine.ops.gemm.scaled_matmul import GATED_TILE, W8A8Tile, matmul
from engine.ops.gemm.skinny_launch import Workspace
from engine.plugins.quant.w8a8_tiles import ROW_CLASSES
from engine.plugins.quant.w8a8_waves import SQUARE_TILE, tile_by_waves

ROWS = (
    576, 640, 768, 896, 1024, 1152, 1216, 1280, 1408, 1536, 1664, 1920, 2048, 2176, 2240, 2432, 2560, 3072, 3328, 4096,
    8192,
)  # fmt: skip
LAYERS = (
    "4096x14336", "4096x4096", "6144x4096", "28672x4096", "5120x17408", "2560x9728", "4096x12288", "3072x8192",
)  # fmt: skip
TILES = {"128x256": GATED_TILE, "128x128": SQUARE_TILE}
COLD_BYTES = 120e6
"""Weights of one graph, so that no cache holds them."""
MAX_COPIES = 8
MEASURED = 2000.0
"""Microseconds that a graph is replayed for, about, per round."""
RATE = 1.2e9
"""Operations per microsecond, about."""

Call = Callable[[torch.Tensor], torch.Tensor]


@frozen(eq=False)
class Operands:
    """Random operands of a layer, for the largest number of rows."""

    x: torch.Tensor
    x_scale: torch.Tensor
    weights: list[torch.Tensor]
    """Copies of one weight."""
    scale: torch.Tensor
    workspace: Workspace

    @classmethod
    def make(cls, kind: str, layer: str, workspace: Workspace) -> Operands:
        """Operands of a layer."""
        outputs, inputs = map(int, layer.split("x"))
        x, x_scale = quantize_rows(torch.randn(max(ROWS), inputs, device=DEVICE).bfloat16(), KINDS[kind])
        weight, scale = quantize_rows(torch.randn(outputs, inputs, device=DEVICE).bfloat16(), KINDS[kind])
        copies = min(MAX_COPIES, max(2, int(COLD_BYTES / weight.nbytes) + 1))
        return cls(x, x_scale, [weight, *(weight.clone() for _ in range(copies - 1))], scale, workspace)

    def ways(self, rows: int) -> dict[str, Call]:
        """Calls that multiply by a weight."""
        x, x_scale = self.x[:rows], self.x_scale[:rows]

        def by_tile(tile: W8A8Tile) -> Call:
            more = (self.scale, None, torch.bfloat16, tile, self.workspace)
            return lambda weight: matmul(x, x_scale, weight, *more)

        def library(weight: torch.Tensor) -> torch.Tensor:
            scales = {"scale_a": x_scale[:, None], "scale_b": self.scale[None, :]}
            return torch._scaled_mm(x, weight.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)

        found = {name: by_tile(tile) for name, tile in TILES.items()}
        return found if x.dtype == torch.int8 else {**found, "torch": library}

    def graph(self, way: Call, pool: Any) -> torch.cuda.CUDAGraph:
        """A graph of one call per weight, in random order."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for weight in random.sample(self.weights, len(self.weights)):
                way(weight)
        return graph


def microseconds(graph: torch.cuda.CUDAGraph, calls: int, estimate: float) -> float:
    """Of one call; `estimate` too."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replays = max(1, round(MEASURED / (estimate * calls)))
    graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / (replays * calls)


def measure(operands: Operands, rounds: int, pool: Any) -> dict[int, dict[str, float]]:
    """Microseconds of each way, by number of rows."""
    outputs, inputs = operands.weights[0].shape
    for way in operands.ways(ROWS[0]).values():  # compiles
        way(operands.weights[0])
    torch.cuda.synchronize()
    graphs = {(rows, name): operands.graph(way, pool) for rows in ROWS for name, way in operands.ways(rows).items()}
    taken: dict[tuple[int, str], list[float]] = {one: [] for one in graphs}
    for _ in range(rounds):
        for one in random.sample(list(graphs), len(graphs)):
            estimate = 2 * one[0] * outputs * inputs / RATE + 3
            taken[one].append(microseconds(graphs[one], len(operands.weights), estimate))
    return {
        rows: {name: round(statistics.median(taken[some, name]), 2) for some, name in graphs if some == rows}
        for rows in ROWS
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--layers", nargs="*", default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    workspace, pool, sms = Workspace(DEVICE), torch.cuda.graph_pool_handle(), num_sms(DEVICE)
    found = {}
    for layer in arguments.layers:
        outputs, inputs = map(int, layer.split("x"))
        for kind in arguments.kinds:
            print(f"{kind} {layer}", flush=True)
            for rows, times in measure(Operands.make(kind, layer, workspace), arguments.rounds, pool).items():
                found[f"{kind} {layer} {rows}"] = times
                row_class = next((size for size in ROW_CLASSES if size >= rows), ROW_CLASSES[-1])
                chosen = tile_by_waves(GATED_TILE, rows, row_class, outputs, inputs, sms)
                listed = "  ".join(
                    f"{name} {taken:.1f}{'*' if TILES.get(name) == chosen else ' '}" for name, taken in times.items()
                )
                print(f"{rows:5d} {GATED_TILE.programs(rows, outputs) / sms:6.2f} waves  {listed}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "times": found}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
