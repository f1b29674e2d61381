"""What linear layers lose at numbers of rows that autotuning does not measure: the engine's choice next to all tiles.

    python benchmarks/row_classes.py [--kinds fp8 int8 4bit] [--shapes 4096x4096 gated:28672x4096 ...]
        [--seeds 11 12 ...] [--rows 288 301 ...] [--limit SECONDS] [--json FILE]

Autotuning measures a row class at its largest number of rows; a rule may choose another tile for fewer rows. Each
class is tuned here as at start-up; then the chosen tile and TILES are timed at other numbers of rows, after the norm
that makes their input, from CUDA graphs with cold weights, all tiles of a layer and number of rows in random order.
Results are compared with each other first. Shapes that --seeds draws are those of shape_sweep.py.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from sweep_cases import LINEAR_KINDS, LinearCase, LinearShape, Space, draw
from sweep_linears import Layer, LinearSweep
from sweep_timing import make_timer, run_in_threads, runs
from triton.errors import TritonError

from engine.core.autotune import TuningTask, group_calls, measure, pick_fastest
from engine.core.errors import EngineError
from engine.ops.common.launch import num_sms
from engine.ops.gemm.persistent_tile import SIZES, PersistentTile
from engine.ops.gemm.scaled_matmul import W8A8Tile
from engine.ops.gemm.weight_only_tiles import WeightOnlyTile, fits_workspace
from engine.ops.norm.rms_norm import add_rms_norm
from engine.ops.norm.rms_norm_quantize import add_rms_norm_quantize
from engine.plugins.quant import w8a8_waves

ROWS = {
    "fp8": (288, 320, 384, 448, 512, 576, 640, 768, 896, 1043, 1152, 1280, 1408, 1536, 1700, 2048, 2432, 3072),
    "4bit": (
        72, 96, 128, 144, 160, 173, 192, 224, 256, 288, 320, 352, 384, 448, 512, 576, 640, 704, 768, 896, 1024, 1408,
    ),
}  # fmt: skip
ROWS["int8"] = ROWS["fp8"]
SHAPES = ("3840x2304", "6144x6144", "4096x4096", "6144x4096", "4096x14336", "1024x3072", "2560x9728", "7168x5120")
SHAPES_4BIT = (
    "gated:11776x1280", "gated:12288x2048", "4096x4096", "6144x4096", "gated:28672x4096", "4096x14336", "2560x9728",
    "1024x2048", "gated:6144x1024", "2368x11008",
)  # fmt: skip
W8_TILES = (
    W8A8Tile(rows=64, outputs=32, warps=4, stages=8, block_k=256, persistent=True),
    *w8a8_waves.TIMES,
)
MAX_WAVES = 12
"""Tiles with more waves than this are left out."""
MAX_SECONDS = 250e-6
"""Products that take longer are left out: they have many waves."""
MAX_COPIES = 64
COLD_BYTES = 120e6
"""Weights of one graph, so that no cache holds them."""
MIN_CLASS = {"fp8": 512, "int8": 512, "4bit": 64}
"""Row classes from this on are tuned."""
MAX_WEIGHTS = 120e6
"""Layers with more weights are left out."""
RATE = {"4bit": 6e14, "int8": 1.2e15, "fp8": 1.2e15}
"""Operations per second, about."""


class SharedTile(PersistentTile):
    """A PersistentTile whose programs share those tiles that fill no wave."""

    def __str__(self) -> str:
        return f"{super().__str__()}, shared"

    def programs(self, weight_rows: int, blocks: int, rows: int, most: int) -> int:
        """The fewest programs that take no longer than the most."""
        units = self.tiles(weight_rows, rows) * blocks
        return most if units >= most * blocks else -(-units // -(-units // most))


class EvenTile(PersistentTile):
    """A PersistentTile whose programs share no tile."""

    def __str__(self) -> str:
        return f"{super().__str__()}, even"

    def programs(self, weight_rows: int, blocks: int, rows: int, most: int) -> int:
        """The most programs that each compute equally many tiles."""
        tiles = self.tiles(weight_rows, rows)
        return max(count for count in range(1, most + 1) if tiles % count == 0)


def w8_tiles(rows: int, outputs: int, sms: int) -> Iterable[Any]:
    """The persistent tiles of a W8A8 GEMM that may be fast."""
    for tile in W8_TILES:
        if tile.programs(rows, outputs) <= MAX_WAVES * sms and tile.rows * tile.outputs * 8 > rows * outputs / sms:
            yield tile


def w4_tiles(rows: int, shape: Any, sms: int) -> Iterable[Any]:
    """The persistent tiles of a weight-only GEMM: with splits, or tiles that programs share or do not share."""
    for tile in SIZES:
        tiles = tile.tiles(shape.weight_rows, rows)
        if tiles > MAX_WAVES * sms or tile.columns >= max(2 * rows, 128):
            continue
        yield tile
        programs = tile.programs(shape.weight_rows, shape.blocks, rows, sms)
        for other in (kind(rows=tile.rows, columns=tile.columns) for kind in (SharedTile, EvenTile)):
            number = other.programs(shape.weight_rows, shape.blocks, rows, sms)
            if number != programs and 3 * number > sms and tiles // number <= -(-tiles // sms):
                yield other
        for splits in (2, 4, 8):
            split = evolve(tile, splits=splits)
            if split.can_split(shape.weight_rows, shape.blocks, rows, sms):
                yield split


class Ways:
    """The ways to multiply by one layer."""

    def __init__(self, kind: str, shape: LinearShape, layer: Layer) -> None:
        self.kind = kind
        self.shape = shape
        self.copies = layer.copies[: min(MAX_COPIES, int(COLD_BYTES / layer.linear.nbytes) + 2)]
        self.layer = layer
        tasks = group_calls(layer.autotuned_calls())
        self.tasks = [task for task in tasks if self._is_mine(task) and task.rows >= MIN_CLASS[kind]]
        self.op = self.tasks[0].op
        self.device = torch.device(layer.linear.spec.device)
        self.best: dict[int, Any] = {}
        """The choices of the row classes."""

    def _is_mine(self, task: TuningTask) -> bool:
        return ("w8a8" in task.op.key) == (self.kind != "4bit")

    def _fits(self, tile: Any, rows: int) -> bool:
        """Whether a tile is a weight-only one whose sums have room in the workspace."""
        return isinstance(tile, WeightOnlyTile) and (
            tile.splits == 1 or fits_workspace(tile, tile.programs(self.op.shape, rows), tile.splits)
        )

    def tiles(self, rows: int) -> list[Any]:
        """The chosen tile first, then others. None: the library."""
        sms = num_sms(self.device)
        if self.kind == "4bit":
            others = [*w4_tiles(rows, self.op.shape, sms)]
            chosen = self.op._matmul.tile(self.op.shape, rows)
            narrow = [one for size, one in self.best.items() if rows <= 2 * size <= 512 and self._fits(one, rows)]
            library = [None] if rows > 200 else []
            return list(dict.fromkeys([chosen, *others, *narrow, *library]))
        matmul = self.op._matmul
        found = [matmul.tile(rows), *w8_tiles(rows, self.shape.outputs, sms)]
        row_class = next((size for size in matmul.row_classes if size >= rows), matmul.row_classes[-1])
        if row_class in matmul._chosen:
            found.append(matmul._chosen[row_class])
        return list(dict.fromkeys([*found, None] if matmul.shape.has_scaled_mm else found))

    def calls(self, tile: Any, rows: int) -> Sequence[Callable[[], torch.Tensor]]:
        """Norm and product, a call per copy of the weights."""
        torch.manual_seed(rows)
        inputs = self.layer.linear.spec.in_features
        x = torch.randn(rows, inputs, device=self.device).bfloat16()
        scale = torch.ones(inputs, device=self.device).bfloat16()
        if self.kind == "4bit":
            ops = list(self.layer.autotuned_calls())[: len(self.copies)]
            normed = partial(add_rms_norm, x, None, scale, 1e-5)
            return [lambda one=one: one.op.run(tile, normed()[0], one.operands) for one in ops]
        matmul = self.op._matmul
        scale = scale.float()

        def call(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
            values, scales, _ = add_rms_norm_quantize(
                x, None, scale, 1e-5, matmul.weight_dtype, scale=None, scaling=matmul.scaling, other=None
            )
            return matmul.multiply_quantized(values, scales, weights, None, tile)

        return [lambda weights=weights: call(weights) for weights in self.copies]

    def programs(self, tile: Any, rows: int) -> float:
        """Tiles per multiprocessor."""
        sms = num_sms(self.device)
        if isinstance(tile, W8A8Tile):
            return tile.programs(rows, self.shape.outputs) / sms
        if isinstance(tile, PersistentTile):
            return tile.tiles(self.shape.outputs, rows) / sms
        return 0.0

    def check(self, rows: int) -> list[str]:
        """Compare the results of all tiles with those of the library or the first one. Returns which are wrong."""
        wrong = []
        tiles = self.tiles(rows)
        results = {str(tile): self.calls(tile, rows)[0]().float() for tile in tiles}
        exact = results.get("None", next(iter(results.values())))
        for name, result in results.items():
            error = float((result - exact).norm() / exact.norm())
            if not error < 0.02 or (self.kind == "int8" and not torch.equal(result, exact)):
                wrong.append(f"{self.kind} {self.shape}, {rows} rows, {name}: wrong by {error:.4f}")
        return wrong


def parse_shape(text: str) -> LinearShape:
    """`gated:OUTPUTSxINPUTS` or `OUTPUTSxINPUTS`."""
    gated, _, sizes = text.rpartition(":")
    outputs, inputs = map(int, sizes.split("x"))
    return LinearShape(outputs=outputs, inputs=inputs, gated=bool(gated))


def shapes_of(kind: str, options: argparse.Namespace) -> list[LinearShape]:
    """The given shapes and drawn ones."""
    found = [parse_shape(one) for one in options.shapes or (SHAPES_4BIT if kind == "4bit" else SHAPES)]
    for seed in options.seeds:
        cases = (one for one in draw(seed, 40, Space()) if isinstance(one, LinearCase) and one.kind == kind)
        found += [one.shape for one in cases if one.shape.outputs * one.shape.inputs <= MAX_WEIGHTS]
    return list(dict.fromkeys(found))


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=LINEAR_KINDS[1:], default=LINEAR_KINDS[1:])
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=[])
    parser.add_argument("--rows", nargs="*", type=int, default=[])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--limit", type=float, default=100, help="seconds for all kinds together")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, begin = torch.device(options.device), time.perf_counter()
    timer = make_timer(device)
    found: dict[str, dict[str, float]] = {}
    failures: list[str] = []
    for place, kind in enumerate(options.kinds, 1):
        deadline = options.limit * place / len(options.kinds)
        shapes = shapes_of(kind, options)
        rows_of = [*options.rows] or [*ROWS[kind]]
        compiled: set[tuple[str, bool]] = set()
        for number, shape in enumerate(shapes):
            if time.perf_counter() - begin > deadline:
                print(f"{kind}: {len(shapes) - number} shapes are left out", flush=True)
                break
            case = LinearCase(kind=kind, shape=shape, rows=64)
            try:
                sweep = LinearSweep(kind, str(device), "bfloat16", timer, [case])
                ways = Ways(kind, shape, sweep._layers[shape])
                failures += measure_shape(ways, rows_of, timer, found, compiled)
            except (EngineError, TritonError, RuntimeError) as error:  # other shapes may still run
                failures.append(f"{kind} {shape}: {type(error).__name__}: {error}")
            print(f"  {time.perf_counter() - begin:.1f} s", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=0))
    if failures:
        raise SystemExit("error: these failed or are wrong:\n" + "\n".join(failures))


def measure_shape(
    ways: Ways, wanted: Sequence[int], timer: Any, found: dict[str, dict[str, float]], compiled: set[tuple[str, bool]]
) -> list[str]:
    """Tune the layer's classes, check its tiles, and time them at the wanted numbers of rows. Returns what is wrong."""
    shape, kind = ways.shape, ways.kind
    for task, timings in zip(ways.tasks, measure(ways.tasks, timer), strict=True):
        best, _ = pick_fastest(task, timings)
        task.choose(best)
        ways.best[task.rows] = best
        found[f"{kind} {shape} {task.rows} class"] = {str(one): round(t * 1e6, 2) for one, t in timings.items()}
        print(f"{kind} {shape} class {task.rows}: {best}", flush=True)
    estimate = 2 * shape.outputs * shape.inputs / RATE[kind]
    rows_of = [rows for rows in wanted if estimate * rows < MAX_SECONDS] or [wanted[0]]
    new = {(str(tile), bool(shape.gated)): (tile, rows) for rows in rows_of for tile in ways.tiles(rows)}
    run_in_threads([ways.calls(tile, rows)[0] for name, (tile, rows) in new.items() if name not in compiled])
    compiled |= set(new)
    wrong = ways.check(rows_of[len(rows_of) // 2] - 3)
    for rows in rows_of:
        tiles = ways.tiles(rows)
        times: dict[str, float] = {}
        for tile in random.sample(tiles, len(tiles)):
            calls = ways.calls(tile, rows)
            if not runs(calls[0]):
                continue
            times[str(tile)] = timer.per_call(calls) * 1e6
        chosen = times[str(tiles[0])]
        order = sorted(times, key=lambda one: times[one])
        waves = {str(tile): ways.programs(tile, rows) for tile in tiles}
        listed = "  ".join(f"{_short(one)} {times[one]:.1f} ({waves[one]:.2f})" for one in order[:6])
        regret = chosen / times[order[0]]
        print(f"{kind} {shape} {rows:5d} {regret:.3f} {_short(str(tiles[0]))} {chosen:.1f} | {listed}")
        found[f"{kind} {shape} {rows}"] = {"chosen": round(chosen, 2), **{one: round(times[one], 2) for one in order}}
    return wrong


def _short(name: str) -> str:
    """A short name of a tile."""
    return name.replace(", persistent", "p").replace(" warps", "w").replace(" stages", "s").replace(", ", ",")


if __name__ == "__main__":
    main()
